"""Sets in COCO's format: what is read, what is dropped and why, what is refused in one line."""

import json
import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as oracle

from tests.common.detection.coco_files import (
    BROKEN,
    CATEGORIES,
    IMAGES,
    SEGMENTATIONS,
    box,
    content,
    runs,
    without,
    write,
)
from vil.data.image import UnreadableImage
from vil.tasks.detection.data.coco_json import REASONS
from vil.tasks.detection.data.datasets import (
    CocoDataset,
    build_detection_set,
)
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

NO_MASK = REASONS[-1]


def dataset(root, annotations, split="train", *, masks=False, keep_empty=False, **more):
    folder, file = write(root, annotations, **more)
    return CocoDataset(folder, file, split, masks=masks, keep_empty=keep_empty)


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_used_is_dropped_with_its_reason(case, tmp_path, caplog):
    row, reason = BROKEN[case]
    found = dataset(tmp_path, [box(5, image=2), row, box(6, image=1, category=7)])
    (dropped,) = found.dropped
    assert reason in dropped.reason
    assert dropped.about == "annotation 1"
    assert dropped.image == ("" if reason == "an image" else "a.png")
    assert f"1 of 3 annotations are dropped ({dropped.reason}: 1)" in caplog.text
    assert [found[i][1]["labels"].tolist() for i in range(2)] == [[2], [1]]


def test_what_is_dropped_of_a_test_set_is_said_to_count(tmp_path, caplog):
    rows = [box(1), box(2, bbox=[1, 1, 0, 3]), box(3, category=99), box(4, bbox=[1, 2])]
    dataset(tmp_path, [without(row, "segmentation") for row in rows], "val", masks=True)
    counted, no_masks = caplog.messages
    assert "4 of 4 annotations are dropped" in counted
    assert "but AP counts 2 of them, as pycocotools does; run" in counted
    assert "no usable segmentation, so the AP of masks is NaN" in no_masks


@pytest.mark.parametrize("case", SEGMENTATIONS)
def test_what_no_mask_can_be_drawn_of_is_dropped_where_masks_are_wanted(case, tmp_path):
    segmentation, usable = SEGMENTATIONS[case]
    rows = [box(1, segmentation=segmentation), box(2)]
    assert dataset(tmp_path, rows).dropped == []
    found = dataset(tmp_path, rows, masks=True)
    assert [d.reason for d in found.dropped] == ([] if usable else [NO_MASK])
    masks = found[0][1]["masks"]
    assert masks.shape == (1 + usable, 30, 40)
    assert masks.flatten(1).any(dim=1).all()


def test_targets_are_what_the_contract_says(tmp_path):
    rows = [
        box(1, bbox=(-3, 25.5, 10, 100)),  # cut at two borders
        box(2, category=7, bbox=(39, 0, 1, 1)),  # one pixel
        box(3, iscrowd=1),
    ]
    found = dataset(tmp_path, rows, masks=True)
    assert (found.classes, found.category_ids) == (["two", "seven of nine"], [2, 7])
    image, target = found[0]
    assert (image.shape, image.dtype) == ((3, 30, 40), torch.uint8)
    assert torch.equal(target["boxes"], torch.tensor([[0, 25.5, 7, 30], [39, 0, 40, 1]]))
    assert target["boxes"].dtype == torch.float32
    assert target["labels"].tolist() == [1, 2]
    assert target["labels"].dtype == torch.int64
    assert (target["masks"].shape, target["masks"].dtype) == ((2, 30, 40), torch.uint8)
    assert target["image_id"] == 1
    assert "masks" not in dataset(tmp_path, rows)[0][1]


def test_training_skips_images_without_boxes_and_evaluation_does_not(tmp_path):
    rows = [box(1, image=2), box(2, image=4, iscrowd=1), box(3, image=3, bbox=(0, 0, 0, 0))]
    train = dataset(tmp_path, rows)
    assert [train.sample_name(i) for i in range(len(train))] == ["deep/er/b.png"]
    assert train.groups.tolist() == [0]
    for whole in (dataset(tmp_path, rows, "val"), dataset(tmp_path, rows, keep_empty=True)):
        assert [whole.sample_name(i) for i in range(4)] == [name for name, *_ in IMAGES]
        assert whole.groups.tolist() == [1, 0, 1, 1]
        assert [len(whole[i][1]["boxes"]) for i in range(4)] == [0, 1, 0, 0]
        assert whole[0][1]["boxes"].shape == (0, 4)
        assert [whole[i][1]["image_id"] for i in range(4)] == [1, 2, 3, 4]
    assert dataset(tmp_path, rows, "val", masks=True)[0][1]["masks"].shape == (0, 30, 40)


def test_the_size_of_the_image_file_is_used(tmp_path):
    """The annotation file says 40 x 30; the image has 25 x 20 pixels."""
    rows = [box(1, bbox=(20, 15, 20, 15), segmentation=runs(30, 40, (20, 15, 40, 30)))]
    rows += [box(2, bbox=(30, 5, 9, 9)), box(3)]
    folder, file = write(tmp_path, rows)
    Image.new("RGB", (25, 20)).save(folder / "a.png")
    image, target = CocoDataset(folder, file, "train", masks=True)[0]
    assert target["boxes"].tolist() == [[20, 15, 25, 20], [2, 3, 12, 13]]
    assert target["masks"].shape == (2, 20, 25)
    assert target["masks"][0].sum() == 25
    assert target["masks"][0, 15:, 20:].all()


def test_masks_are_those_of_pycocotools(tmp_path):
    """Polygons in hundredths of pixels, also beyond the border, in parts; both kinds of RLE."""
    random = np.random.default_rng(1)
    segmentations = [
        [(random.uniform(-8, 48, 2 * random.integers(3, 9))).round(2).tolist() for _ in range(n)]
        for n in (1, 1, 1, 2, 3) * 6
    ]
    segmentations += [runs(30, 40), runs(30, 40, form="numbers"), runs(30, 40, (0, 0, 40, 30))]
    rows = [box(n, bbox=(0, 0, 40, 30), segmentation=s) for n, s in enumerate(segmentations)]
    masks = dataset(tmp_path, rows, masks=True)[0][1]["masks"].numpy()
    for mask, segmentation in zip(masks, segmentations, strict=True):
        rle = segmentation
        if isinstance(rle, list) or isinstance(rle["counts"], list):
            rle = oracle.frPyObjects(rle, 30, 40)
        rle = oracle.merge(rle) if isinstance(rle, list) else rle
        assert np.array_equal(mask, oracle.decode(rle))


def refusal(folder, file, split="train", **options):
    """What is said, in one line, with the exit code of bad data."""
    with pytest.raises(DataError) as caught:
        CocoDataset(folder, file, split, **options)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


WHOLE = content([box(1)])
FILES = {
    "empty": ("", "is not JSON, or is truncated"),
    "cut": (json.dumps(WHOLE)[:200], "is not JSON, or is truncated"),
    "nested": ("[" * 100_000, "is not JSON, or is truncated"),
    "binary": (b"\xff\x00\x89PNG", "is not JSON, or is truncated"),
    "a list": ("[]", "has no list 'images'; expected COCO's format: images"),
    "one key less": (json.dumps(without(WHOLE, "categories")), "has no list 'categories'; exp"),
    "not a list": (json.dumps(WHOLE | {"annotations": {}}), "has no list 'annotations'; exp"),
    "no annotations": (json.dumps(WHOLE | {"annotations": []}), "has no usable box .* no annotat"),
    "no images": (json.dumps(WHOLE | {"images": []}), "has no images; expected"),
    "a number": (json.dumps(WHOLE | {"annotations": [3]}), r"annotations\[0\] is not an object"),
    "an image's name": (
        json.dumps(WHOLE | {"images": [{"id": 1, "width": 4, "height": 5}]}),
        r"images\[0\] has no 'file_name'; expected",
    ),
    "an image's side": (
        json.dumps(WHOLE | {"images": [{"id": 1, "width": 0, "height": 5, "file_name": "a"}]}),
        r"images\[0\] has width 0",
    ),
    "an image's id": (
        json.dumps(WHOLE | {"images": [{"id": 1.5, "width": 4, "height": 5, "file_name": "a"}]}),
        r"images\[0\] has id 1.5, which is not of type int \| str",
    ),
    "a huge id": (
        json.dumps(WHOLE | {"images": [WHOLE["images"][0] | {"id": 10**30}]}),
        "an id of more than 64 bits",
    ),
    "a name of no file": (
        json.dumps(WHOLE | {"images": [WHOLE["images"][0] | {"file_name": "\ud800"}]}),
        "has a file_name that is not text",
    ),
    **{
        f"a name that leads out: {name}": (
            json.dumps(WHOLE | {"images": [WHOLE["images"][0] | {"file_name": name}]}),
            f"^the file_name '{name}' is not inside of the folder .*pictures$",
        )
        for name in ("../a.png", "deep/../../a.png", "/etc/passwd", "", ".")
    },
    "an image twice": (
        json.dumps(WHOLE | {"images": WHOLE["images"][:1] * 2}),
        "two of its images have the id 1",
    ),
    "a category twice": (
        json.dumps(WHOLE | {"categories": CATEGORIES + CATEGORIES[:1]}),
        "two of its categories have the id 7",
    ),
    "a category's name": (
        json.dumps(WHOLE | {"categories": [WHOLE["categories"][0] | {"name": "\ud800x"}]}),
        r"categories\[0\] has a name that is not text: '\\ud800x'",
    ),
    "all dropped": (
        json.dumps(content([box(1, bbox=(0, 0, 0, 0)), box(2, iscrowd=1)])),
        r"no usable box to train with, of 2 annotations \(a box without area: 1, a crowd: 1\)",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_one_line(case, tmp_path):
    folder, file = write(tmp_path, [])
    text, said = FILES[case]
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    assert re.search(said, refusal(folder, file))


def test_a_whole_path_into_the_folder_is_fine(tmp_path):
    """As `vil predict --format coco` writes it, where it was given one."""
    folder, _ = write(tmp_path, [])
    whole = [WHOLE["images"][0] | {"file_name": str(folder / "a.png")}]
    (tmp_path / "whole.json").write_text(json.dumps(WHOLE | {"images": whole}))
    assert len(CocoDataset(folder, tmp_path / "whole.json", "train")[0][1]["labels"]) == 1


def test_missing_files_are_named(tmp_path):
    images = [(f"{n}.png", 9, 9) for n in range(7)]
    folder, file = write(tmp_path, [box(n, image=n + 1) for n in range(7)], images=images)
    assert refusal(folder, tmp_path / "no.json").startswith("there is no annotation file")
    assert refusal(tmp_path / "no", file).startswith("there is no image folder")
    (folder / "3.png").unlink()
    assert refusal(folder, file) == f"images of {file} are missing from {folder}: 3.png"
    for picture in folder.iterdir():
        picture.unlink()
    every = "0.png, 1.png, 2.png, 3.png, 4.png and 2 more"
    assert refusal(folder, file, "val") == f"images of {file} are missing from {folder}: {every}"
    with pytest.raises(ValueError, match="unknown split 'tests'"):
        CocoDataset(folder, file, "tests")


def test_a_broken_image_is_distinguished_from_other_errors(tmp_path):
    folder, file = write(tmp_path, [box(1)])
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:60])
    with pytest.raises(UnreadableImage):
        CocoDataset(folder, file, "train")[0]


def test_ids_may_be_anything_and_rows_in_any_order(tmp_path):
    rows = [box("x", image=3), box(2**70), box(None, image=3, category=7), without(box(0), "id")]
    rows.append(box([1], bbox=(0, 0, 0, 0)))
    found = dataset(tmp_path, rows)
    assert found.dropped[0].about == "annotation [1]"
    assert [found[i][1]["labels"].tolist() for i in range(2)] == [[1, 1], [1, 2]]


def test_own_layouts(tmp_path):
    folder, file = write(tmp_path, [box(1)])
    (tmp_path / "train_set").mkdir()
    folder.rename(tmp_path / "train_set/img")
    file.rename(tmp_path / "train.json")
    own = {"images": "{split}_set/img", "annotations": "{split}.json"}
    found = build_detection_set("coco", tmp_path, "train", masks=True, **own)
    assert len(found) == 1
    assert found.annotations == tmp_path / "train.json"
    with pytest.raises(DataError, match="annotations/instances_val2017.json"):
        build_detection_set("coco", tmp_path, "val", masks=False)
    with pytest.raises(ValueError, match="unknown detection set 'cocoo'; did you mean 'coco'"):
        build_detection_set("cocoo", tmp_path, "val", masks=False)


def test_a_dataset_is_small_in_memory_and_can_be_sent(tmp_path):
    """Of 20,000 annotations no Python object stays: forked workers would copy their pages."""
    rows = [box(n, 1 + n % 4, (2, 3, 10, 10 + n / 20_000)) for n in range(20_000)]
    found = dataset(tmp_path, rows, masks=True)
    sent = pickle.dumps(found, protocol=5)
    assert len(sent) < 20_000 * 150
    again = pickle.loads(sent)
    assert torch.equal(again[1][1]["masks"], found[1][1]["masks"])
    objects = sum(len(v) for v in vars(found).values() if isinstance(v, list))
    assert objects == 2 * len(CATEGORIES)
