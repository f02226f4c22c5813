"""Out-of-fold predictions: every image once, by the run that was not trained on it."""

import csv
from pathlib import Path

import numpy as np
import pytest

import vil
from tests.common.data_files import png_bytes, write_tsv
from tests.common.small_runs import SMALL
from tests.common.small_runs import vil as command

CLASSES, PER_CLASS, FOLDS = 3, 4, 3
NAMES = [f"part{number}.yaml" for number in range(FOLDS)]


def train(folder, tests, trains, *words):
    own = [f"DATA.TRAIN=[{','.join(trains)}]", f"DATA.TEST=[{','.join(tests)}]", *words]
    vil.train(
        None,
        [*SMALL, "OPTIM.EPOCHS=1", f"DATA.NUM_CLASSES={CLASSES}", "DATALOADER.BSZ=8", *own],
        output_dir=folder,
        data=folder.parent,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs, each trained on two of three TSV files and tested on the third."""
    root = tmp_path_factory.mktemp("folds")
    for number, name in enumerate(NAMES):
        files = {
            f"c{label}/{number}{i}.png": png_bytes(100 * number + 10 * label + i, (40, 36))
            for label in range(CLASSES)
            for i in range(PER_CLASS)
        }
        write_tsv(root, "train", files, name=name.removesuffix(".yaml"))
    for number, name in enumerate(NAMES):
        train(root / f"fold{number}", [name], [n for n in NAMES if n != name])
    return root


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_image_is_predicted_once_by_its_run(runs):
    found = list(vil.predict_out_of_fold(str(runs / "fold*")))
    assert len(found) == CLASSES * PER_CLASS * FOLDS == len({p.file for p in found})
    for prediction in found:  # labels of a TSV file are numbers, the classes of the run
        assert prediction.target == prediction.file[1]
    correct = []
    for number in range(FOLDS):
        (metrics,) = vil.evaluate(runs / f"fold{number}").values()
        own = [p for p in found if p.file.split("/")[1].startswith(str(number))]
        hits = [str(p.classes[0][0]) == p.target for p in own]
        assert 100 * np.mean(hits) == pytest.approx(metrics["top1"])
        correct += hits
    ended = command("predict", "--run", runs / "fold*", "--out-of-fold", "--format", "csv",
                    "--output-file", "oof.csv")  # fmt: skip
    assert ended.code == 0, ended.err
    assert f"{sum(correct)} of {len(found)} correct" in ended.err
    with open("oof.csv", encoding="utf-8") as file:
        first = [row for row in csv.DictReader(file) if row["rank"] == "1"]
    assert [(row["file"], row["target"]) for row in first] == [(p.file, p.target) for p in found]
    assert [int(row["index"]) for row in first] == [p.classes[0][0] for p in found]


@pytest.mark.long
def test_runs_with_a_validation_part_predict_their_fold(tmp_path):
    """Not the validation images, which chose the checkpoint."""
    for number in range(2):
        folds = (f"DATA.FOLD={number}", "DATA.FOLDS=2", "DATA.VAL=[fake]", "DATA.VAL_FRACTION=0.3")
        kwargs = "DATA.KWARGS={n: 48, size: 32, num_classes: 3}"
        train(tmp_path / f"fold{number}", ["fake"], ["fake"], kwargs, *folds)
    found = list(vil.predict_out_of_fold(str(tmp_path / "fold*")))
    assert len(found) == len({p.file for p in found}) == 48
    ended = command("export", "--run", tmp_path / "fold0", "--out", "fold0.pt2", "--check")
    assert ended.code == 0, ended.err
    assert "test set fake model" in ended.out
    assert "count 24" in ended.out


def test_probabilities_and_views(runs):
    words = ["predict", "--run", runs / "fold*", "--out-of-fold", "--tta", "hflip"]
    assert command(*words, "--format", "probabilities", "--output-file", "all.csv").code == 0
    with open("all.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "0", "1", "2", "target", "error"]
    assert len(rows) == CLASSES * PER_CLASS * FOLDS
    plain = {p.file: dict(p.classes) for p in vil.predict_out_of_fold(str(runs / "fold*"))}
    differences = [abs(float(row["0"]) - plain[row["file"]][0]) for row in rows]
    assert 0 < max(differences) < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "fold0", "--run", "fold1"], "12 of the 36 training images are not in a test"),
        (["--run", "fold*", "--run", "again"], "12 images are in the test sets of two runs, for"),
        (["--run", "leak", "--run", "fold1"], "trained on 12 of the 12 images of its test set"),
        (["--run", "other"], "the test sets of other (fake) are not in DATA.TRAIN of any run"),
        ([], "--out-of-fold needs a run for each fold"),
        (["--run", "fold*", "--sample"], "predicts the runs' test images: leave out --sample"),
    ],
)
def test_wrong_runs(runs, words, message, monkeypatch):
    monkeypatch.chdir(runs)
    if "again" in words and not Path("again").exists():
        train(runs / "again", NAMES[:1], NAMES[1:])
    if "leak" in words and not Path("leak").exists():
        train(runs / "leak", NAMES[:1], NAMES)
    if "other" in words and not Path("other").exists():
        kwargs = "DATA.KWARGS={n: 8, size: 32, num_classes: 3}"
        train(runs / "other", ["fake"], NAMES, kwargs)
    ended = command("predict", "--out-of-fold", *words)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
