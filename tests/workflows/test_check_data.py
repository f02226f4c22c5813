"""vil data check: what the data contain, what is wrong with them, and which keys would fit."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.common.small_runs import FOLDER, succeeds, vil
from tests.common.small_tasks import SMALL_TASKS
from vil.utils.errors import DataError
from vil.workflows.check_data import check_data

OPTIONS = [*FOLDER, "DATALOADER.BSZ=4"]
ODD = "d\no[g] ß\udc80"  # a newline, markup, and a byte that is not UTF-8


def save(path, seed, size=(64, 48)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path):
    """14 training images, 12 of them cats, and 4 test images."""
    root = tmp_path / "photos"
    for split, counts, start in (("train", (12, 2), 0), ("val", (2, 2), 100)):
        for name, count in zip(("cat", ODD), counts):
            for number in range(count):
                save(root / split / name / f"{number}.png", start + number + 50 * (name == ODD))
    return root


def check(root, *options, **kwargs):
    return check_data(None, [*OPTIONS, *options], data=root, **kwargs)


def test_a_sound_set_is_counted(photos):
    found = check(photos, "DATALOADER.WORKERS=1", "DATA.NUM_CLASSES=7")
    assert found.is_usable
    assert not found.warnings
    assert list(found.splits) == ["train", "val/folder"]
    train = found.splits["train"]
    assert train.targets.counts == {"cat": 12, ODD: 2}
    assert (train.images.num_images, train.images.unreadable) == (14, 0)
    assert (train.images.sizes == (64, 48)).all()
    assert np.allclose(train.images.mean, 0.5, atol=0.02)
    assert np.allclose(train.images.std, (1 / 12) ** 0.5, atol=0.02)
    assert found.suggestions["DATA.NUM_CLASSES"] == 2
    assert found.suggestions["INPUT.IMAGE_SIZE"] == 48
    (line,) = (line for line in found.lines() if "INPUT.IMAGE_SIZE 48  # " in line)
    assert "the median shorter side of the training images, 48 px" in line
    assert found.reasons.keys() == found.suggestions.keys()
    assert len(found.suggestions["INPUT.MEAN"]) == 3


def test_copies_and_leaks_are_found(photos):
    shutil.copy(photos / "train/cat/0.png", photos / "val/cat/copy.png")
    shutil.copy(photos / "train/cat/1.png", photos / "train/cat/again.png")
    found = check(photos)
    assert found.is_usable
    assert found.duplicates.within == {"train": 1}
    assert found.duplicates.leaks == {("train", "val/folder"): 1}
    leak, copy = found.warnings
    assert "1 image of val/folder is also in train" in leak
    assert "train/cat/0.png and val/cat/copy.png" in leak
    assert "train: 1 image is a copy of another, such as train/cat/1.png and train/cat/" in copy


def test_an_image_in_several_classes_is_named(photos):
    (photos / "train" / ODD).rename(photos / "train/dog")
    (photos / "val" / ODD).rename(photos / "val/dog")
    shutil.copy(photos / "train/cat/0.png", photos / "train/dog/x.png")
    line = "1 image is in several classes: train/cat/0.png (cat), train/dog/x.png (dog)"
    assert line in check(photos).warnings
    shutil.copy(photos / "train/cat/1.png", photos / "val/dog/y.png")
    line = "2 images are in several classes: train/cat/0.png (cat), train/dog/x.png (dog); train/"
    assert any(warning.startswith(line) for warning in check(photos).warnings)


def test_unreadable_and_blank_images_are_listed(photos):
    for number in range(12):
        (photos / f"train/cat/bad{number:02}.png").write_bytes(b"<html>")
    Image.new("RGB", (40, 40), "gray").save(photos / "train/cat/blank.png")
    found = check(photos)
    images = found.splits["train"].images
    assert (images.unreadable, len(images.bad_samples)) == (12, 10)
    assert not found.is_usable
    (problem,) = found.problems
    assert "12 of 27 images cannot be read" in problem
    assert any("1 image has almost one color: train/cat/blank.png" in w for w in found.warnings)
    assert sum(line.startswith("unreadable: ") for line in found.lines()) == 11
    assert check(photos, "DATA.MAX_BAD_FRACTION=0.5").is_usable
    with pytest.raises(DataError, match="12 of 27"):
        found.raise_if_unusable()


def test_a_missing_split_is_a_problem(photos):
    shutil.rmtree(photos / "val")
    found = check(photos)
    assert list(found.splits) == ["train"]
    (problem,) = found.problems
    assert problem.startswith("val/folder: there is no folder")
    assert problem.count("Expected:\n") == 1
    failed = vil("data", "check", "--data", photos, *OPTIONS)
    assert f"problem: {problem}\n" in failed.out
    assert "val" not in failed.err


def test_the_command_writes_a_sheet_and_json(photos, tmp_path):
    sheet, table = tmp_path / "sheet.png", tmp_path / "check.json"
    words = ("data", "check", "--data", photos, *OPTIONS)
    printed = succeeds(*words, "--sheet", sheet, "--json", table)
    assert "train: the largest class has 6.0 x the images of the smallest" in printed
    assert printed.endswith("the data can be used\n")
    assert Image.open(sheet).height > 4 * 112
    result = json.loads(table.read_text())
    assert result["usable"]
    assert result["splits"]["train"]["imbalance"] == 6
    (photos / "train/cat/0.png").write_bytes(b"")
    failed = vil(*words)
    assert failed.code == 3
    assert failed.out.count("problem: train: 1 of 14 images cannot be read") == 1
    assert failed.err.count("\n") == 1


@pytest.mark.detection
def test_detectors_count_images_and_boxes(tmp_path):
    options = ["DATA.KWARGS={train: 4, val: 2}", "DATALOADER.WORKERS=0"]
    found = check_data("scenes/mask_rcnn_vil_nano.yaml", options, data=tmp_path)
    assert found.is_usable
    train = found.splits["train"]
    assert sum(train.targets.counts.values()) <= len(train.dataset.labels)
    assert "INPUT.IMAGE_SIZE" not in found.suggestions
    empty = "4 images, 0 of them without a usable box and mask"
    assert train.targets.notes[0] == f"{len(train.dataset.labels)} boxes; {empty}"
    found.draw(tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").width > 600


def test_unusable_masks_of_any_split_are_a_problem(tmp_path):
    """Because evaluation stops at the same share as training. Empty masks do not stop it."""
    for split, values in (("train", (0, 1)), ("val", (0, 7)), ("test", (255, 255))):
        save(tmp_path / f"images/{split}/a.png", 1)
        mask = np.tile(np.array(values, np.uint8), (48, 32))
        (tmp_path / f"masks/{split}").mkdir(parents=True)
        Image.fromarray(mask).save(tmp_path / f"masks/{split}/a.png")
    options = [*SMALL_TASKS["segmentation"], "DATA.TRAIN=[folder]", "DATA.TEST=[folder]"]
    options += ["DATA.VAL=[folder]", "DATA.KWARGS={}", "DATA.NUM_CLASSES=2"]
    found = check_data(None, options, data=tmp_path)
    (problem,) = found.problems
    assert problem.startswith("val/folder: 1 of 1 images have an unusable mask: images/val/a.png (")
    assert "test/folder: 1 of 1 images have no labeled pixel: images/test/a.png" in found.warnings
    assert check_data(None, [*options, "DATA.MAX_BAD_FRACTION=1"], data=tmp_path).is_usable


def test_parts_of_the_training_images_and_the_number_auto(photos):
    shutil.rmtree(photos / "val")
    split = ["DATA.VAL=[folder]", "DATA.VAL_FRACTION=0.2", "DATA.TEST_FRACTION=0.25"]
    found = check(photos / "train", "DATA.NUM_CLASSES=auto", "DATA.VAL_FRACTION=0.2")
    assert found.is_usable
    assert sum(each.images.num_images for each in found.splits.values()) == 14
    assert "DATA.NUM_CLASSES" not in found.suggestions
    for number in range(2, 6):
        save(photos / "train" / ODD / f"{number}.png", 90 + number)
    found = check(photos / "train", *split)
    assert list(found.splits) == ["train", "val/folder", "test/folder"]
    assert sum(each.images.num_images for each in found.splits.values()) == 18


@pytest.mark.parametrize(
    ("most", "suffix", "proposal"),
    [(4095, "tif", [0, 4095]), (900, "png", [0, 1023]), (60_000, "tif", None)],
)
def test_a_value_range_is_proposed_for_few_bits_stored_in_16(tmp_path, most, suffix, proposal):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            path = tmp_path / split / name / f"1.{suffix}"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.linspace(0, most, 48 * 64).reshape(48, 64).astype(np.uint16)).save(
                path
            )
    found = check(tmp_path, "DATA.NUM_CLASSES=2")
    assert found.suggestions.get("DATA.VALUE_RANGE") == proposal
    given = check(tmp_path, "DATA.NUM_CLASSES=2", "DATA.VALUE_RANGE=[0, 5000]")
    assert "DATA.VALUE_RANGE" not in given.suggestions
