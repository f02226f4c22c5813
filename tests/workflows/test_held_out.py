"""Held-out images that another division gives are not evaluated in silence."""

import shutil

import pytest

import vil
from tests.common.small_runs import FOLDER, SMALL, draw_pictures
from vil.utils.errors import DataError

WORDS = [*SMALL, *FOLDER, "OPTIM.EPOCHS=1", "DATALOADER.BSZ=4"]
COUNT = 6  # images of each of two classes
OTHERS = "was trained on other images than the division leaves"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two folds of a cross-validation."""
    root = draw_pictures(tmp_path_factory.mktemp("runs"), {"data/cat": COUNT, "data/dog": COUNT})
    for fold in range(2):
        own = ["DATA.FOLDS=2", f"DATA.FOLD={fold}"]
        vil.train(None, [*WORDS, *own], output_dir=root / f"fold{fold}", data=root / "data")
    return root


@pytest.fixture
def grown(runs):
    added = shutil.copy(runs / "data/cat/0.png", runs / "data/cat/0_new.png")
    yield
    added.unlink()


def evaluate(run, *words):
    return vil.evaluate(run, list(words))["folder"]["count"]


def test_the_same_images_are_evaluated(runs):
    assert evaluate(runs / "fold0") == COUNT
    assert len(list(vil.predict_out_of_fold(str(runs / "fold*")))) == 2 * COUNT


def test_an_image_more_changes_the_division(runs, grown):
    with pytest.raises(DataError, match="fold0 was trained on other images.*6 then, 6 now"):
        evaluate(runs / "fold0")
    with pytest.raises(DataError, match=OTHERS):
        next(vil.predict_out_of_fold(str(runs / "fold*")))
    assert evaluate(runs / "fold0", "RUN.ALLOW_CHANGES=True") == COUNT + 1


@pytest.mark.parametrize("word", ["DATA.FOLD=1", "DATA.SPLIT_SEED=9"])
def test_other_keys_change_the_division(runs, word):
    with pytest.raises(DataError, match=OTHERS):
        evaluate(runs / "fold0", word)


def test_a_set_that_was_not_trained_on_is_not_compared(runs):
    draw_pictures(runs, {"other/val/cat": 2, "other/val/dog": 1, "other/train/cat": 1})
    draw_pictures(runs / "other/train", {"dog": 1})
    assert evaluate(runs / "fold0", f"DATA.PATH={runs / 'other'}", "DATA.FOLDS=0") == 3


def test_sets_that_are_not_divided_need_no_training_images(runs):
    """The validation images are held out, the test images are another set."""
    draw_pictures(runs, {"own/cat": 4, "own/dog": 4})
    own = ["DATA.VAL=[folder]", "DATA.VAL_FRACTION=0.25", "DATA.TEST=[table]"]
    table = "\n".join(["path,label", *(f"{c}/{i}.png,{c}" for c in ("cat", "dog") for i in (0, 1))])
    (runs / "own/labels.csv").write_text(table)
    vil.train(None, [*WORDS, *own], output_dir=runs / "run", data=runs / "own")
    shutil.move(runs / "own", runs / "moved")
    for name in ("labels.csv", "cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"):
        (runs / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(runs / "moved" / name, runs / "own" / name)
    assert vil.evaluate(runs / "run")["table"]["count"] == 4
    with pytest.raises(DataError, match=OTHERS):
        vil.evaluate(runs / "run", part="val")
