"""`vil train --dry-run` describes the data, and finds mistakes."""

import re
import shlex
from pathlib import Path

from PIL import Image

from tests.common.small_runs import (
    FOLDER,
    SMALL,
    TINY,
    draw_pictures,
    succeeds,
    vil,
)
from vil.config import get_config
from vil.tasks.base import Task
from vil.tasks.image.build import ConfiguredTask


def test_a_task_without_synthetic_images_has_no_dry_run(monkeypatch):
    monkeypatch.setattr(ConfiguredTask, "synthetic", Task.synthetic)
    ended = vil("train", *TINY, "--dry-run")
    assert ended.code == 2
    assert "--dry-run trains on images of its method synthetic, which it does not" in ended.err


def test_a_dry_run_fails_on_data_that_are_missing_or_wrong():
    draw_pictures("pets", {"train/cat": 16, "train/dog": 16, "val/cat": 1})
    words = [*SMALL, *FOLDER, "--dry-run", "OPTIM.ACCUMULATE=2"]
    assert vil("train", *words, "--data", "pets", "DATA.NUM_CLASSES=3").code == 2
    assert vil("train", *words, "--data", "pets", "DATALOADER.BSZ=17").code == 2
    ended = vil("train", *words, "--data", "pats")
    assert ended.code == 3
    assert "there is no folder pats: set --data" in ended.err
    assert not Path("runs").exists()
    draw_pictures("pits", {"train/cat": 16, "train/dog": 16, "val/cat": 1, "val/cow": 1})
    ended = vil("train", *words, "--data", "pits")
    assert ended.code == 3
    assert "cow" in ended.err
    draw_pictures("puts", {"train/cat": 16, "train/dog": 16, "val/cat": 1})
    Path("puts/train/dog/broken.png").write_bytes(b"no image")
    ended = vil("train", *words, "--data", "puts")
    assert ended.code == 3
    assert "1 image of folder cannot be read, such as train/dog/broken.png, more" in ended.err


def test_a_dry_run_describes_the_data():
    draw_pictures("pets", {"train/cat": 16, "train/dog": 32, "val/cat": 3, "val/dog": 2})
    words = [*SMALL, *FOLDER, "--dry-run", "--data", "pets", "--output_dir", "deep/run"]
    left_out = "16 of 48 training images are left out of each epoch"
    assert left_out in " ".join(succeeds("train", *words, "DATALOADER.BSZ=32").split())
    lines = succeeds("train", *words).splitlines()
    assert len(lines) <= 30
    assert lines[0] == "train folder: 48 images of 2 classes"
    assert lines[1] == "  images per class: 16 (cat) to 32 (dog), a ratio of 2"
    sample = r"32 of 48 images \(vil data check reads all\)"
    assert re.fullmatch(rf"  width x height of {sample}: median \d+ x \d+, .*", lines[2])
    assert lines[3:5] == [
        "val folder: 5 images of 2 classes",
        "  images per class: 2 (dog) to 3 (cat), a ratio of 1.5",
    ]
    assert "an epoch has 3 steps" in lines
    assert "one step of 16 synthetic images" in lines[-1]
    assert "OPTIM.EPOCHS=2" in " ".join(lines)
    assert Image.open("deep/run.dry-run.png").size[0] > 4 * 224
    assert [entry.name for entry in Path("deep").iterdir()] == ["run.dry-run.png"]


def test_the_changed_keys_of_a_dry_run_make_the_same_config():
    shown = succeeds("train", *TINY, "AUG.TIMM_AUG.AUTO_AUGMENT=", "--dry-run", "SEED=7")
    keys = shown.partition("(--all prints all keys):\n")[2].partition("\nthe model has")[0]
    assert get_config(None, shlex.split(keys)) == get_config(
        None, [*TINY, "AUG.TIMM_AUG.AUTO_AUGMENT=", "SEED=7"]
    )


def test_a_dry_run_describes_validation_and_test_splits():
    parts = ("DATA.VAL=digits", "DATA.VAL_FRACTION=0.1", "DATA.TEST_FRACTION=0.1")
    sets = ("DATA.TRAIN=digits", "DATA.TEST=digits", "DATA.NUM_CLASSES=auto", "DATA.KWARGS={}")
    shown = succeeds("train", *SMALL, *sets, *parts, "--dry-run", "--example", "e.png")
    counts = re.findall(r"^(\w+) digits: (\d+) images of 10 classes$", shown, re.MULTILINE)
    assert [part for part, _ in counts] == ["train", "val", "test"]
    assert sum(int(count) for _, count in counts) == 1437  # all parts of the training digits


def test_a_dry_run_writes_the_example_to_the_given_file():
    succeeds("train", *TINY, "--dry-run", "--example", "e.png")
    assert sorted(path.name for path in Path().iterdir()) == ["e.png"]
    for words, message in (
        (["--dry-run", "--example", "e.txt"], ".png"),
        (["--dry-run", "--example", "no/e.png"], "there is no folder no"),
        (["--example", "e.png"], "--example needs --dry-run"),
        (["--all"], "--all needs --dry-run"),
    ):
        ended = vil("train", *TINY, *words)
        assert (ended.code, message in ended.err) == (2, True), ended.err


def test_a_test_set_without_images_of_a_class_is_named():
    draw_pictures("pets", {"train/cat": 16, "train/dog": 16, "val/cat": 2})
    ended = vil("train", *SMALL, *FOLDER, "--data", "pets", "OPTIM.EPOCHS=1")
    assert "folder: 1 of 2 classes have no image, such as dog" in ended.out
