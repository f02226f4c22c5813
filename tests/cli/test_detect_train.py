"""vil train: the loop of classifiers, from a config to a resumed run."""

import json

import pytest
import torch

import vil as package
from tests.common.built import load_model_path, task_of
from tests.common.small_runs import checkpoint, metrics, vil
from tests.common.small_tasks import DETECTOR
from vil.config import get_config
from vil.tasks.detection.data.fake import write_fake
from vil.tasks.detection.models import detectors
from vil.tasks.detection.models.weights import load_detector

ABSOLUTE = "l1,h1,d16,n1,s1,g1,p4,f3,a1_l2,h2,d32,n1,s1,g1,p2,f3,a1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detector") / "run"
    data = folder.parent
    outcome = vil("train", "--output_dir", folder, "--data", data, *DETECTOR)
    assert outcome.code == 0, outcome.err
    return folder


def test_a_run_tells_losses_and_average_precision(run):
    points = metrics(run)
    losses = {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness"}
    assert all(losses < point.keys() for point in points if point["split"] == "train")
    last = [point for point in points if point["split"] == "val/fake_boxes"][-1]
    assert {"box_ap", "box_ap50", "mask_ap", "mask_ap50"} < last.keys()
    assert last["count"] == 8
    assert (run / "classes.txt").read_text().split("\n")[:3] == [
        "category 1", "category 2", "category 3",
    ]  # fmt: skip
    assert (run / "checkpoints/best").exists()


def test_it_starts_from_a_detector_with_other_categories(run, tmp_path):
    words = (
        "train", "--data", tmp_path, "--output_dir", tmp_path / "run", *DETECTOR,
        f"MODEL.MODEL_PATH={run}", "DATA.NUM_CLASSES=5", "OPTIM.EPOCHS=1",
        "DATA.KWARGS={n: 8, size: 64, num_classes: 5}",
    )  # fmt: skip
    refused = vil(*words)
    assert refused.code == 4
    assert "a head of another size" in refused.err
    (tmp_path / "rows.txt").write_text("0 1 2 2 2")
    rows = vil(*words, f"FINETUNE.HEAD=rows:{tmp_path / 'rows.txt'}")
    assert rows.code == 2
    assert "detectors support only 'keep' and 'new'" in rows.err
    assert vil(*words, "FINETUNE.HEAD=new").code == 0


@pytest.mark.defect("B33")
def test_stages_can_be_frozen(run, tmp_path):
    words = ("FINETUNE.FREEZE_STAGES=1", f"MODEL.MODEL_PATH={run}", "OPTIM.EPOCHS=1")
    folder = tmp_path / "run"
    line = ("train", "--data", tmp_path, "--output_dir", folder, *DETECTOR, *words)
    assert vil(*line).code == 0
    cfg = get_config(None, [*DETECTOR, *words, "DETECTION.TEST.SCORE=0.0"])
    before, after = (package.build_model(cfg) for _ in range(2))
    load_model_path(before, cfg)
    frozen = [name for name, p in before.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(name.startswith("backbone.body.stages.0.") for name in frozen)
    load_detector(after, checkpoint(folder) / "model.safetensors")
    old, new = before.state_dict(), after.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in frozen)
    assert not torch.equal(old["rpn.head.bbox_pred.weight"], new["rpn.head.bbox_pred.weight"])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["DATA.NUM_CLASSES=80"], 2, "DATA.NUM_CLASSES is 80, but fake_boxes has 3 classes"),
        (["DATA.TRAIN=[fake_boxes,scenes]"], 2, "a detector trains on one set"),
        (["DATA.TRAIN=[digits]"], 2, "digits"),
        (["DETECTION.MODEL=mask_rnn"], 2, "did you mean mask_rcnn"),
        (["MODEL.ARCH=timm/resnet18"], 2, "DETECTION.MODEL needs MODEL.ARCH msvit"),
        (["DATA.TARGETMAP=map.json"], 2, "DATA.TARGETMAP is for classifiers"),
        (
            [
                f"MODEL.VIT.MSVIT.ARCH={ABSOLUTE}",
                "MODEL.VIT.POS_RESIZE=crop",
                "INPUT.IMAGE_SIZE=95",
            ],
            2,
            "INPUT.IMAGE_SIZE 95 is too small: for images of DETECTION.INPUT.MAX_SIZE 96 pixels",
        ),
        (["DATA.TRAIN=[coco]"], 3, "instances_train2017.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_one_line(words, code, says, tmp_path):
    data = ("--output_dir", tmp_path / "run", "--data", tmp_path)
    outcome = vil("train", *data, *DETECTOR, *words)
    assert outcome.code == code, outcome.err
    assert says in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["AUG.MIXUP_PROB=0.5", "AUG.MIXUP=0.8"], ["AUG.MIXUP_PROB", "AUG.MIXUP"]),
        (["LOSS.LOSS=focal", "LOSS.FOCAL.GAMMA=2.0"], ["LOSS.LOSS", "LOSS.FOCAL.GAMMA"]),
        (["DETECTION.MODEL=faster_rcnn"], ["DETECTION.MASK.CHANNELS", "DETECTION.MASK.LAYERS"]),
        (["DETECTION.INPUT.JITTER=[0.5,2.0]"], ["DETECTION.INPUT.TRAIN_SIZES"]),
        (["AUG.REPEATED_AUG=True"], []),
        ([], []),
    ],
    ids=str,
)  # fmt: skip
def test_unused_settings_are_reported(words, told, caplog):
    cfg = get_config(None, [*DETECTOR, *words])
    task_of(cfg)
    assert [record.getMessage().split("no effect: ")[1] for record in caplog.records] == [
        ", ".join(told)
    ] * bool(told)


@pytest.mark.parametrize(("names", "told"), [("abc", False), ("acb", True)])
def test_categories_in_another_order_are_matched_by_name(names, told, tmp_path, caplog):
    """Their ids may be others."""
    for split, called, first in (("train", "abc", 1), ("val", names, 5)):
        write_fake(tmp_path, split, 4, (48, 64), num_classes=3)
        file = tmp_path / f"annotations/instances_{split}.json"
        table = json.loads(file.read_text())
        for number, (row, name) in enumerate(zip(table["categories"], called)):
            row["name"], row["id"] = name, first + number
        for row in table["annotations"]:
            row["category_id"] += first - 1
        file.write_text(json.dumps(table))
    outcome = vil(
        "train", "--output_dir", tmp_path / "run", "--data", tmp_path,
        *(word for word in DETECTOR if "KWARGS" not in word), "OPTIM.EPOCHS=1",
        "DATA.TRAIN=[coco]", "DATA.TEST=[coco]",
        "DATA.KWARGS={images: '{split}', annotations: 'annotations/instances_{split}.json'}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    line = "coco has the model's classes in another order: they are matched by name"
    assert (line in (tmp_path / "run/log.txt").read_text()) == told
    caplog.clear()
    assert vil("evaluate", "--run", tmp_path / "run").code == 0
    assert (line in caplog.text) == told


def test_a_dry_run_uses_synthetic_images(tmp_path, monkeypatch):
    """As large as training may draw them."""
    largest, check = set(), detectors.check_targets

    def seen(images, targets):
        largest.update(tuple(image.shape[-2:]) for image in images)
        check(images, targets)

    monkeypatch.setattr(detectors, "check_targets", seen)
    monkeypatch.chdir(tmp_path)
    outcome = vil("train", "--dry-run", *DETECTOR, "--example", "e.png")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) <= 30
    assert "dry run: one step of 4 synthetic images" in outcome.out
    assert largest == {(64, 96)}
    assert [path.name for path in tmp_path.iterdir()] == ["e.png"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 0, ""),
        (["DATA.KWARGS={train: 3}"], 2, "a step takes DATALOADER.BSZ 4 x"),
        (["DATA.KWARGS={low: 10}"], 2, "48 <= low <= high"),
    ],
    ids=str,
)
def test_a_dry_run_leaves_no_scenes(words, code, says, tmp_path, monkeypatch):
    """Drawing all would take half a minute, and fill a folder of the user's."""
    monkeypatch.chdir(tmp_path)
    other = [word for word in DETECTOR if "KWARGS" not in word]
    sets = ("DATA.TRAIN=[scenes]", "DATA.TEST=[scenes]", "DATA.NUM_CLASSES=10")
    outcome = vil("train", "--dry-run", *other, *sets, *words, "--example", "e.png")
    assert (outcome.code, says in outcome.err) == (code, True), outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["e.png"] * (code == 0)


def test_a_dry_run_counts_the_objects_of_a_coco_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_fake(tmp_path / "mine", "train", 6, (48, 64), 3)
    write_fake(tmp_path / "mine", "val", 2, (48, 64), 3)
    paths = "DATA.KWARGS={images: '{split}', annotations: 'annotations/instances_{split}.json'}"
    words = ("DATA.TRAIN=[coco]", "DATA.TEST=[coco]", paths, "DATA.NUM_CLASSES=3")
    other = [word for word in DETECTOR if "DATA." not in word]
    run = ("train", "--dry-run", *other, *words, "--data")
    outcome = vil(*run, "mine")
    assert outcome.code == 0, outcome.err
    assert "train coco: 6 images of 3 classes\n  objects per class: " in outcome.out
    assert "width x height of 6 images: median 64 x 48" in outcome.out
    assert vil(*run, "nowhere").code == 3


def test_every_command_counts_the_same_images_without_a_box(tmp_path, monkeypatch):
    """Also images whose only box is a crowd's, and those that training leaves out."""
    monkeypatch.chdir(tmp_path)
    write_fake(tmp_path / "mine", "train", 6, (48, 64), 3)
    write_fake(tmp_path / "mine", "val", 2, (48, 64), 3)
    file = tmp_path / "mine/annotations/instances_train.json"
    table = json.loads(file.read_text())
    first, second = (image["id"] for image in table["images"][:2])
    table["annotations"] = [row for row in table["annotations"] if row["image_id"] != first]
    for row in table["annotations"]:
        row["iscrowd"] = int(row["image_id"] == second)
    file.write_text(json.dumps(table))
    other = [word for word in DETECTOR if "DATA." not in word]
    words = (*other, "DETECTION.MODEL=faster_rcnn", "DATA.TRAIN=[folder]", "DATA.TEST=[folder]")
    words = (*words, "DATA.NUM_CLASSES=auto", "--data", "mine")
    for command in ("train --dry-run", "data check"):
        for keep, end in ((True, "\n"), (False, ", which training leaves out")):
            outcome = vil(*command.split(), *words, f"DETECTION.INPUT.KEEP_EMPTY={keep}")
            assert outcome.code == 0, outcome.err
            assert f" 6 images, 2 of them without a usable box{end}" in outcome.out
    assert " 6, 2 of them without a usable box\n" in vil("detect", "check", "mine").out


@pytest.mark.parametrize("config", ["mask_rcnn_vil_tiny_1x", "retinanet_vil_tiny_1x"])
def test_analyze_counts_every_part(config):
    """The parts sum up; the convolutions of the heads by hand, at 64 x 64."""
    shown = vil("analyze", "--config-file", f"coco/{config}.yaml", "INPUT.IMAGE_SIZE=64").out
    rows = [line.replace(",", "").split() for line in shown.splitlines()[1:]]
    *parts, total = [(row[0], int(row[-2]), int(row[-1])) for row in rows]
    assert total[1:] == tuple(map(sum, zip(*(part[1:] for part in parts))))
    macs = {name: count for name, _, count in parts}
    if "mask" in config:
        cells = sum(n * n for n in (16, 8, 4, 2, 1))
        assert macs["rpn"] == cells * (9 * 256**2 + 256 * 15)
        assert macs["boxes"] == 1000 * (49 * 256 * 1024 + 1024**2 + 1024 * 81 * 5)
    else:
        cells = sum(n * n for n in (8, 4, 2, 1, 1))
        assert macs["head"] == cells * 9 * 256 * (8 * 256 + 9 * 81 + 9 * 4)
