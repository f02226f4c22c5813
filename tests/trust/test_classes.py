"""Classes are matched by name: in evaluation, on resume, in prediction and reports."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.common.small_runs import SMALL, results, succeeds, vil
from vil.config import get_config
from vil.data.classes import match_classes
from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError

pytestmark = pytest.mark.trust(3)

USAGE, DATA = 2, 3
COLORS = {"blue": (20, 20, 220), "green": (20, 220, 20), "red": (220, 20, 20)}
TRAIN = (*SMALL, "DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=3", "OPTIM.LR=0.05",
         "OPTIM.EPOCHS=6", "DATALOADER.BSZ=12", "DATALOADER.WORKERS=0")  # fmt: skip


def paint(root, names=None, count=12):
    """Images of each color, in class folders of these names."""
    for split in ("train", "val"):
        for name, color in zip(names or COLORS, COLORS.values()):
            folder = Path(root, split, name)
            folder.mkdir(parents=True)
            for number in range(count):
                shade = tuple(min(255, c + 2 * number) for c in color)
                Image.new("RGB", (32, 32), shade).save(folder / f"{number}.png")
    return Path(root)


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """A run that tells three colors apart, and its data."""
    folder = tmp_path_factory.mktemp("colors")
    data, run = paint(folder / "data"), folder / "run"
    succeeds("train", "--output_dir", run, "--data", data, *TRAIN, "RUN.EVAL_EVERY=6")
    assert results_of(run, data)["top1"] == 100
    return run, data


def results_of(run, data, *words):
    out = run.parent / "out"
    succeeds("evaluate", "--run", run, "--data", data, "--output_dir", out, *words)
    return results(out)["folder"]


def renumber(run, order):
    """Write another order of classes into a copy of a run, as if it was trained with that."""
    copy = run.parent / f"run-{''.join(map(str, order))}"
    shutil.copytree(run, copy, dirs_exist_ok=True)
    names = list(COLORS)
    (copy / "classes.txt").write_text("".join(f"{names[i]}\n" for i in order))
    return copy


def test_another_order_is_matched_by_name(colors, caplog):
    """The run's classes are numbered 2, 0, 1: the right answers are now wrong by name."""
    run, data = colors
    copy = renumber(run, (2, 0, 1))
    assert results_of(copy, data)["top1"] == 0
    assert "has the model's classes in another order: they are matched by name" in caplog.text
    assert results_of(copy, data, "DATA.CLASSES=by_position")["top1"] == 100


def test_weights_of_a_run_bring_their_names(colors):
    """MODEL.MODEL_PATH of a checkpoint finds the run's classes too."""
    run, data = colors
    copy = renumber(run, (1, 2, 0))
    out = run.parent / "by-path"
    words = ("--config-file", run / "config.yaml", "--output_dir", out, "--data", data)
    succeeds("evaluate", *words, f"MODEL.MODEL_PATH={copy}")
    assert results(out)["folder"]["top1"] == 0


def test_other_names_are_refused(colors, tmp_path):
    run, _ = colors
    data = paint(tmp_path / "data", ["azure", "green", "red"])
    ended = vil("evaluate", "--run", run, "--data", data, "--output_dir", tmp_path / "out")
    assert ended.code == DATA
    assert (
        "folder has other classes than the model (missing: blue; added: azure): "
        "to match classes by number, set DATA.CLASSES to by_position\n" in ended.err
    )
    assert results_of(run, data, "DATA.CLASSES=by_position")["top1"] == 100


def test_a_resumed_run_keeps_its_classes(colors, tmp_path):
    """The training set in another order, as by a renamed folder that was renamed back."""
    run, data = colors
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "classes.txt").write_text("red\nblue\ngreen\n")
    ended = vil("train", "--output_dir", copy, "--resume", "OPTIM.EPOCHS=7")
    assert ended.code == 4, ended.err  # the labels, and so the fingerprint of the data, differ
    assert "RUN.ALLOW_CHANGES" in ended.err
    assert (copy / "classes.txt").read_text() == "red\nblue\ngreen\n"


def test_other_classes_do_not_resume(colors, tmp_path):
    run, _ = colors
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    data = paint(tmp_path / "data", ["azure", "green", "red"])
    ended = vil("train", "--output_dir", copy, "--resume", "--data", data, "OPTIM.EPOCHS=7")
    assert ended.code == DATA
    assert "the training set has other classes than the model" in ended.err


def test_predictions_keep_the_order_of_the_run(colors, tmp_path, caplog):
    run, data = colors
    (tmp_path / "names.txt").write_text("green\nblue\nred\n")
    image = data / "val/red/0.png"
    words = ("predict", "--run", run, image, "--classes", tmp_path / "names.txt")
    ended = vil(*words, "--format", "json")
    assert json.loads(ended.out)[0]["classes"][0]["class"] == "red"
    assert "the model's order is used" in caplog.text


def test_rows_of_a_head_bring_their_names(colors, tmp_path):
    run, data = colors
    (tmp_path / "rows.txt").write_text("2 0")  # red, blue
    words = (f"FINETUNE.HEAD=rows:{tmp_path / 'rows.txt'}", "DATA.NUM_CLASSES=2")
    by_path = ("--config-file", run / "config.yaml", f"MODEL.MODEL_PATH={run}")
    for source in (("--run", run), by_path):
        told = succeeds("predict", *source, *words, "--format", "json", data / "val/red/0.png")
        best = json.loads(told)[0]["classes"][0]
        assert (best["class"], best["index"]) == ("red", 0)
    two = shutil.copytree(data, tmp_path / "two", ignore=shutil.ignore_patterns("green"))
    assert results_of(run, two, *words)["top1"] == 100


def start(run, data, out, *words):
    """Top-1 of a run before anything is learned, and its log."""
    still = ("OPTIM.LR=1e-12", "SOLVER.MIN_LR=0", "OPTIM.EPOCHS=1", f"MODEL.MODEL_PATH={run}")
    ended = vil("train", "--output_dir", out, "--data", data, *TRAIN, *still, *words)
    assert ended.code == 0, ended.err
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return last["top1"], (out / "log.txt").read_text()


def test_a_head_is_fine_tuned_by_the_names_of_its_classes(colors, tmp_path):
    """The run's classes are numbered 2, 0, 1: by name, each color is now another one's."""
    run, data = colors
    copy = renumber(run, (2, 0, 1))
    top1, log = start(copy, data, tmp_path / "by-name")
    assert top1 == 0
    assert "the training set has the model's classes in another order: they are matched" in log
    assert (tmp_path / "by-name/classes.txt").read_text() == (copy / "classes.txt").read_text()
    position = start(copy, data, tmp_path / "by-position", "DATA.CLASSES=by_position")
    assert position[0] == 100
    weighted = ("LOSS.CLASS_WEIGHTS=[3, 1, 1]", f"MODEL.MODEL_PATH={copy}")
    ended = vil("train", "--output_dir", tmp_path / "weighted", "--data", data, *TRAIN, *weighted)
    assert ended.code == USAGE
    assert "LOSS.CLASS_WEIGHTS lists a value for each class, but the head of" in ended.err


def test_what_fine_tuning_changes_of_its_source_is_said(colors, tmp_path):
    run, _ = colors
    data = paint(tmp_path / "data", ["azure", "green", "red"])
    _, log = start(run, data, tmp_path / "out", "INPUT.MEAN=[0.1, 0.2, 0.3]")
    assert "is taken for those of the training set in their order, such as its 'blue' for" in log
    saved = get_config(run / "config.yaml").INPUT.MEAN
    assert f"with another normalization; append 'INPUT.MEAN={list(saved)}' to train on" in log
    _, log = start(run, data, tmp_path / "same")
    assert "normalization" not in log


class Named(ImageDataset):
    def __init__(self, classes, targets=(0, 1, 2)):
        import numpy as np

        super().__init__("val")
        self.classes, self.targets = list(classes), np.array(targets)

    def image(self, index):
        raise OSError

    def sample_name(self, index):
        return str(index)


@pytest.mark.parametrize(
    ("here", "learned", "result"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("abc", "cab", [1, 2, 0]),
        ("abc", "012", [0, 1, 2]),
        ("012", "abc", [0, 1, 2]),
        ("abc", "", [0, 1, 2]),
        ("abc", "abd", None),
        ("abc", "ab", None),
        ("aab", "aba", None),
        ("210", "012", [2, 1, 0]),
        ("012", "201", [1, 2, 0]),
        (["10", "2", "1"], ["1", "2", "10"], [2, 1, 0]),
        (["00", "02", "01"], "012", [0, 2, 1]),
        ("012", ["02", "01", "00"], [2, 1, 0]),
        ("012", "123", None),
        ("124", "012", None),
        (["e\u0301", "b", "c"], ["c", "b", "\u00e9"], [2, 1, 0]),
        (["\u00e9", "b", "c"], ["c", "b", "e\u0301"], [2, 1, 0]),
    ],
)
def test_the_rule(here, learned, result):
    dataset = Named(here)
    if result is None:
        with pytest.raises(DataError, match="other classes than the model|same name"):
            match_classes(dataset, learned, "set")
        return
    match_classes(dataset, learned, "set")
    assert dataset.targets.tolist() == result
