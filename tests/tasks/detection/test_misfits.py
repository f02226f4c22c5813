"""Annotations that do not fit their images are reported by every command that reads them."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.common.detection.coco_files import box, content
from tests.common.marks import cases
from tests.common.small_runs import vil
from tests.common.small_tasks import DETECTOR
from vil.data.rle import compress_runs, mask_to_runs
from vil.tasks.detection.coco_eval import to_results
from vil.tasks.detection.data.coco_json import read_annotations
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.data.find_invalid import find_invalid
from vil.tasks.detection.data.masks import Segmentations
from vil.tasks.detection.data.misfits import find_misfits
from vil.tasks.detection.detections import from_target
from vil.utils.errors import DataError

W, H, N = 96, 64, 20
IMAGES = [(f"{n}.png", W, H) for n in range(N)]
CATEGORIES = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]


def rectangles():
    """x y w h of one object per image, all inside of it."""
    random = np.random.default_rng(0)
    sides = random.integers((20, 14), (40, 30), (N, 2))
    corners = random.integers(0, (W, H) - sides)
    return np.concatenate([corners, sides], axis=1).tolist()


def polygon(x, y, w, h):
    return [x, y, x + w, y, x + w, y + h, x, y + h]


def rle(x, y, w, h, size=(H, W), order="F"):
    mask = np.zeros(size, np.uint8)
    mask[y : y + h, x : x + w] = 1
    runs = mask_to_runs(mask if order == "F" else mask.reshape(size[::-1]).T)
    return {"size": list(size), "counts": compress_runs(runs)}


def annotate(to_box=None, to_mask=None):
    """An annotation file's content: one object per image, changed by two functions of x y w h."""
    to_box, to_mask = to_box or (lambda *xywh: xywh), to_mask or (lambda *xywh: [polygon(*xywh)])
    rows = [
        box(n, n + 1, to_box(*xywh), 1 + n % 2, to_mask(*xywh))
        for n, xywh in enumerate(rectangles())
    ]
    return content(rows, IMAGES, CATEGORIES)


def misfits(tmp_path, annotations, *, masks=True):
    file = tmp_path / "file.json"
    file.write_text(json.dumps(annotations))
    return find_misfits(read_annotations(file, masks=masks))


def test_annotations_that_fit(tmp_path):
    assert misfits(tmp_path, annotate()) == []
    assert misfits(tmp_path, annotate(to_mask=rle)) == []
    crowd = annotate(to_mask=lambda *xywh: rle(*xywh) | {"counts": mask_to_runs(np.ones((H, W)))})
    crowd["annotations"] = [row | {"bbox": [0, 0, W, H]} for row in crowd["annotations"]]
    assert misfits(tmp_path, crowd) == []
    rim = annotate(lambda x, y, w, h: (x - 0.9, y - 0.9, w, h))
    assert misfits(tmp_path, rim) == []


BOXES = {
    "corners": (lambda x, y, w, h: (x, y, x + w, y + h), "beyond the image", "x1 y1 x2 y2"),
    "centers": (lambda x, y, w, h: (x + w / 2, y + h / 2, w, h), "beyond the image", "the center"),
    "y first": (lambda x, y, w, h: (y, x, h, w), "beyond the image", "y x height width"),
    "both": (lambda x, y, w, h: (y, x, y + h, x + w), "beyond the image", "y1 x1 y2 x2"),
    "twice as large": (lambda *xywh: [2 * v for v in xywh], "beyond the image", ""),
    "fractions": (lambda x, y, w, h: (x / W, y / H, w / W, h / H), "within 0..1", ""),
}


@pytest.mark.parametrize("case", BOXES)
def test_boxes_of_another_meaning(case, tmp_path):
    to_box, reason, hint = BOXES[case]
    (found,) = misfits(tmp_path, annotate(to_box), masks=False)
    assert reason in str(found)
    assert f"of {N} annotations" in str(found)
    assert found.hint.startswith(f"are boxes {hint}" if hint else "")
    assert bool(found.hint) == bool(hint)


def test_one_box_beyond_its_image_has_no_hint(tmp_path):
    annotations = annotate()
    annotations["annotations"][3]["bbox"] = [80, 10, 40, 20]
    (found,) = misfits(tmp_path, annotations, masks=False)
    assert (found.rows.tolist(), found.hint, found.is_common) == ([3], "", False)
    assert "annotation 3 of 3.png" in str(found)


def test_copies_are_reported_and_used(tmp_path):
    annotations = annotate()
    rows = annotations["annotations"]
    other = rows[0] | {"category_id": 2}
    more = [rows[3] | {"id": 99 + number} for number in range(2 * N)]
    annotations["annotations"] = [*rows, other, *more]
    annotations["images"] += [row | {"id": 100} for row in annotations["images"][4:5]]
    images, copies = misfits(tmp_path, annotations)
    assert str(images).startswith(
        f"1 of {N + 1} images have the file name of another image, such as 4.png: list each image"
    )
    assert str(copies).startswith(
        f"{2 * N} of {3 * N + 1} annotations have the image, category and box of another "
        "annotation, such as annotation 99 of 3.png: remove"
    )
    assert not images.is_common
    assert not copies.is_common
    check = find_invalid(tmp_path / "file.json")
    check.raise_if_unusable()
    lines = check.list_faults(hint=False)
    assert lines[:2] == [f"1 image: {images.reason}", f"  image 4.png: {images.reason}"]
    assert lines[-2:] == [f"warning: {images}", f"warning: {copies}"]


MASKS = {
    "y first": (lambda x, y, w, h: [polygon(y, x, h, w)], "outside of its box", "y, x"),
    "fractions": (
        lambda x, y, w, h: [polygon(x / W, y / H, w / W, h / H)],
        "outside of its box",
        "in fractions",
    ),
    "elsewhere": (lambda x, y, w, h: [polygon(x + 200, y, w, h)], "outside of its box", ""),
    "row by row": (lambda *xywh: rle(*xywh, order="C"), "outside of its box", "row by row"),
    "an empty RLE": (lambda *xywh: rle(0, 0, 0, 0), "outside of its box", ""),
    "twice as large": (lambda *xywh: rle(*xywh, size=(2 * H, 2 * W)), "of another size", "RLEs"),
    "width first": (
        lambda *xywh: rle(*xywh) | {"size": [W, H]},
        "of another size",
        "are their sizes [width, height]",
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_that_do_not_fit_their_box(case, tmp_path):
    to_mask, reason, hint = MASKS[case]
    (found,) = misfits(tmp_path, annotate(to_mask=to_mask))
    assert reason in found.reason
    assert hint in found.hint
    assert found.is_common
    assert misfits(tmp_path, annotate(to_mask=to_mask), masks=False) == []


FORMS = {
    "a flat list": lambda *xywh: polygon(*xywh),
    "pairs": lambda *xywh: np.reshape(polygon(*xywh), (-1, 2)).tolist(),
    "polygons of pairs": lambda *xywh: [np.reshape(polygon(*xywh), (-1, 2)).tolist()],
    "objects": lambda x, y, w, h: [{"x": x, "y": y}, {"x": x + w, "y": y}, {"x": x, "y": y + h}],
    "nested twice": lambda *xywh: [[polygon(*xywh)]],
}


@pytest.mark.parametrize("form", FORMS)
def test_segmentations_in_the_form_of_another_tool_are_counted(form, tmp_path):
    annotations = annotate(to_mask=FORMS[form])
    (found,) = misfits(tmp_path, annotations)
    assert len(found.rows) == found.total == N
    assert "[[x, y, x, y, ...], ...]" in found.hint
    check = find_invalid(tmp_path / "file.json")
    assert [fault.reason for fault in check.faults] == ["no usable segmentation"] * N
    check.raise_if_unusable()  # for boxes alone it can be used
    with pytest.raises(DataError, match="no usable box to train with.*have a segmentation") as e:
        dataset(tmp_path, annotations, masks=True)
    assert "\n" not in str(e.value)


def test_extents_are_those_of_the_masks():
    random = np.random.default_rng(0)
    bitmaps = [random.random((7, 9)) < share for share in (0.03, 0.03, 0.1, 0.5, 1) * 8]
    rles = [{"size": [7, 9], "counts": mask_to_runs(bitmap)} for bitmap in bitmaps]
    for bitmap, extent in zip(bitmaps, Segmentations(rles).extents.tolist()):
        y, x = np.nonzero(bitmap)
        if len(x):
            assert extent == [x.min(), y.min(), x.max() + 1, y.max() + 1]
        else:
            assert np.isnan(extent).all()


def dataset(root, annotations, split="train", **options):
    folder = root / f"{split}2017"
    folder.mkdir(exist_ok=True)
    for name, *size in IMAGES:
        Image.new("RGB", size, "gray").save(folder / name)
    file = root / f"annotations/instances_{split}2017.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(annotations))
    return CocoDataset(folder, file, split, **options)


OWN = (*DETECTOR, "DATA.TRAIN=[coco]", "DATA.TEST=[coco]", "DATA.NUM_CLASSES=2", "DATA.KWARGS={}")
OWN += ("OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0")
COMMANDS = {
    "train": lambda root: ("train", "--data", root, "--output_dir", root / "run", *OWN),
    "dry run": lambda root: (*COMMANDS["train"](root), "--dry-run"),
    "data check": lambda root: ("data", "check", "--data", root, *OWN),
    "detect check": lambda root: (
        *("detect", "check", root / "annotations/instances_train2017.json"),
        *("--images", root / "train2017"),
    ),
}


def change_images(root, split, count, change):
    for name, *_ in IMAGES[:count]:
        file = root / f"{split}2017" / name
        image, options = change(Image.open(file))
        image.save(file, **options)


def turn(image):
    exif = Image.Exif()
    exif[0x112] = 6
    return image, {"exif": exif}


IMAGE_CHANGES = {
    "turned": (turn, "turned (by EXIF)"),
    "halved": (lambda image: (image.resize((W // 2, H // 2)), {}), "resized"),
    "doubled": (lambda image: (image.resize((2 * W, 2 * H)), {}), "resized"),
    "cropped": (lambda image: (image.crop((0, 0, 70, 64)), {}), ""),
}


@pytest.mark.parametrize("change", IMAGE_CHANGES)
@pytest.mark.parametrize("command", ["data check", "detect check", "dry run"])
def test_images_of_another_size_than_the_file_says(command, change, tmp_path):
    function, hint = IMAGE_CHANGES[change]
    dataset(tmp_path, annotate())
    dataset(tmp_path, annotate(), "val")
    change_images(tmp_path, "train", N, function)
    ended = vil(*COMMANDS[command](tmp_path))
    assert ended.code == 3
    text = f"{N} of {N} images have another size than the file says, such as 0.png"
    assert text in ended.out + ended.err
    assert hint in ended.out + ended.err
    assert ended.err.count("\n") <= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_minority_and_a_validation_set_are_reported_and_used(command, tmp_path, caplog):
    annotations = annotate()
    annotations["annotations"][3]["bbox"] = [80, 10, 40, 20]
    dataset(tmp_path, annotations)
    dataset(tmp_path, annotate(BOXES["corners"][0]), "val")
    change_images(tmp_path, "train", 1, turn)
    ended = vil(*COMMANDS[command](tmp_path))
    assert ended.code == 0, ended.err
    log = tmp_path / "run/log.txt"
    text = ended.out + (log.read_text() if log.exists() else caplog.text)
    if command == "detect check":
        assert "1 annotation: a box that reaches more than 1 px beyond the image\n" in text
        assert "1 image: of another size than the file says\n" in text
    else:
        assert f"1 of {N} annotations have a box that reaches more than 1 px" in text
        assert f"1 of {N} images have another size than the file says" in text
        assert "are boxes x1 y1 x2 y2 instead of x y width height?" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_most_boxes_as_corners_are_refused(command, tmp_path):
    dataset(tmp_path, annotate(BOXES["corners"][0]))
    dataset(tmp_path, annotate(), "val")
    ended = vil(*COMMANDS[command](tmp_path))
    assert ended.code == 3
    assert "are boxes x1 y1 x2 y2 instead of x y width height?" in ended.out + ended.err
    assert not (tmp_path / "run/checkpoints").exists()


def lacking(annotations, category):
    """The same without a category and its objects."""
    rows = [row for row in annotations["annotations"] if row["category_id"] != category]
    kept = [row for row in annotations["categories"] if row["id"] != category]
    return annotations | {"annotations": rows, "categories": kept}


@pytest.mark.parametrize("category", cases([1, 2], long=[2]))
def test_a_validation_file_may_lack_a_category(category, tmp_path):
    dataset(tmp_path, annotate())
    dataset(tmp_path, lacking(annotate(), category), "val")
    ended = vil(*COMMANDS["data check"](tmp_path))
    assert ended.code == 0, ended.out
    ended = vil(*COMMANDS["train"](tmp_path))
    assert ended.code == 0, ended.err
    name = CATEGORIES[category - 1]["name"]
    assert (
        f"1 of 2 classes have no images, such as {name}" in (tmp_path / "run/log.txt").read_text()
    )


def test_detections_of_a_lacking_category_are_left_out_of_the_results(tmp_path):
    found = dataset(tmp_path, lacking(annotate(), 1), "val")
    found.reorder_classes(["one", "two"])
    assert (found.classes, found.category_ids) == (["one", "two"], [None, 2])
    target = found[1][1]
    assert target["labels"].tolist() == [2]
    options = dict(image_id=2, size=(H, W), category_ids=found.category_ids)
    (row,) = to_results(from_target(target), **options)
    assert row["category_id"] == 2
    target["labels"] -= 1
    assert to_results(from_target(target), **options) == []


def test_a_validation_file_with_a_further_category_is_refused(tmp_path):
    dataset(tmp_path, lacking(annotate(), 2))
    dataset(tmp_path, annotate(), "val")
    ended = vil(*COMMANDS["train"](tmp_path), "DATA.NUM_CLASSES=1")
    assert ended.code in (2, 3)
    assert ended.err.count("\n") == 1
