"""Detectors: invalid boxes do no harm."""

import json
import math

import pytest

from tests.common.small_runs import metrics, vil

ARCH = "l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0"
# All that draws: sizes, flips, samples of anchors and proposals, random shift, drop path.
DETECTOR = (
    "DETECTION.MODEL=mask_rcnn", "DETECTION.FPN.STAGES=[1,2]", "DETECTION.FPN.CHANNELS=16",
    "DETECTION.ANCHORS.SIZES=[24,48,96]", "DETECTION.RPN.SAMPLES=16", "DETECTION.BOX.CHANNELS=16",
    "DETECTION.BOX.SAMPLES=16", "DETECTION.MASK.CHANNELS=8", "DETECTION.MASK.LAYERS=1",
    "DETECTION.RPN.POST_NMS_TRAIN=20", "DETECTION.RPN.POST_NMS_TEST=20",
    "DETECTION.INPUT.TRAIN_SIZES=[64,80,96]", "DETECTION.INPUT.TEST_SIZE=80",
    "DETECTION.INPUT.MAX_SIZE=128", "INPUT.IMAGE_SIZE=128", f"MODEL.VIT.MSVIT.ARCH={ARCH}",
    "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.DROP_PATH=0.2", "DEVICE=cpu", "LOG_FREQ=1", "SEED=3",
    "DATALOADER.BSZ=4", "OPTIM.LR=1e-3", "OPTIM.EMA=0.9", "OPTIM.CLIP_GRAD=1",
)  # fmt: skip
# invalid boxes in an image of 72 x 96
STRANGE = {
    "no width": [10, 10, 0, 20],
    "no height": [10, 10, 20, 0],
    "negative": [40, 40, -20, 20],
    "outside": [200, 200, 20, 20],
    "reaching out": [80, 60, 100, 100],
    "one pixel": [5, 5, 1, 1],
    "less than a pixel": [5, 5, 0.2, 0.2],
    "larger than the picture": [-50, -50, 500, 500],
    "no number": [math.nan, 5, 10, 10],
    "endless": [5, 5, math.inf, 10],
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A dataset in which every other image has invalid boxes, a crowd or no boxes; some sizes are
    wrong."""
    from vil.tasks.detection.data.fake import write_fake

    root = tmp_path_factory.mktemp("strange")
    for split in ("train", "val"):
        write_fake(root, split, 16, (72, 96), num_classes=3)
        file = root / f"annotations/instances_{split}.json"
        table = json.loads(file.read_text())
        kept = [a for a in table["annotations"] if a["image_id"] % 2]
        for number, box in enumerate(STRANGE.values()):
            kept.append({
                "id": 1000 + number, "image_id": 2 * (number % 4), "category_id": 1, "bbox": box,
                "area": 1.0, "iscrowd": 0, "segmentation": [],
            })  # fmt: skip
        counts = [72 * 48, 72 * 48]
        kept.append({
            "id": 2000, "image_id": 8, "category_id": 2, "bbox": [0, 0, 96, 72], "area": 3456,
            "iscrowd": 1, "segmentation": {"size": [72, 96], "counts": counts},
        })  # fmt: skip
        for image in table["images"][5::4]:
            image["width"], image["height"] = 3 * image["width"], image["height"] // 2
        file.write_text(json.dumps(table | {"annotations": kept}))
    return root


@pytest.mark.parametrize("model", ["mask_rcnn", "faster_rcnn", "retinanet"])
def test_invalid_boxes(strange, model, tmp_path):
    """No crash, a finite loss, and a logged number of dropped annotations."""
    retinanet = ("DETECTION.FPN.STAGES=[2]",) if model == "retinanet" else ()
    outcome = vil(
        "train", "--output_dir", tmp_path / "run", "--data", strange, *DETECTOR,
        f"DETECTION.MODEL={model}", "DATA.TRAIN=[coco]", "DATA.TEST=[coco]", "DATA.NUM_CLASSES=3",
        "DATA.KWARGS={images: '{split}', annotations: 'annotations/instances_{split}.json'}",
        "OPTIM.EPOCHS=2", "DETECTION.INPUT.KEEP_EMPTY=True", *retinanet,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    losses = [point["loss"] for point in metrics(tmp_path / "run") if "loss" in point]
    assert len(losses) == 8
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    assert "are dropped (" in (tmp_path / "run/log.txt").read_text() + outcome.err
