"""The best checkpoint on test images that had no influence on the run."""

import json
import math
import os
import signal

import pytest

import vil
from tests.common.data_files import png_bytes
from tests.common.small_runs import SMALL, metrics, succeeds, torchrun
from vil.config import get_config
from vil.workflows.final_test import evaluate_best

SETS = (
    *SMALL, "DATA.TRAIN=[folder]", "DATA.VAL=[folder]", "DATA.TEST=[folder]",
    "DATA.VAL_FRACTION=0.25", "DATA.FOLDS=4", "DATA.FOLD=1", "DATALOADER.BSZ=6",
    "DATA.NUM_CLASSES=auto", "OPTIM.EMA=0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    root = tmp_path_factory.mktemp("pets")
    for number in range(40):
        file = root / ("cat", "dog", "eel")[number % 3] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(png_bytes(number))
    return root


@pytest.fixture(scope="module")
def trained(pets, tmp_path_factory):
    return vil.train(None, SETS, data=pets, output_dir=tmp_path_factory.mktemp("runs") / "one")


def saved(folder):
    return json.loads((folder / "test_results.json").read_text())


def test_the_test_images_are_evaluated_once_at_the_end(trained):
    folder = trained.run_dir
    (line,) = metrics(folder, "test/")
    assert line["split"] == "test/folder"
    assert line["step"] == trained.best_step
    assert line["top1"] == trained.test_metrics["folder"]["top1"]
    assert trained.history("test/folder") == [line]
    assert {point["count"] for point in metrics(folder, "val/")} == {7}
    assert line["count"] == 10
    assert saved(folder) == {
        "checkpoint": trained.best_checkpoint.name, "metrics": trained.test_metrics
    }  # fmt: skip
    assert get_config(folder / "config.yaml").DATA.NUM_CLASSES == 3
    assert (folder / "log.txt").read_text().count(", evaluation: ") == 1  # one stage with chunks


def test_vil_evaluate_gives_the_same_metrics(trained, tmp_path):
    test = vil.evaluate(trained.run_dir, output_dir=tmp_path)
    assert test == trained.test_metrics
    val = vil.evaluate(trained.run_dir, output_dir=tmp_path, part="val")
    assert val["folder"]["count"] == 7
    assert val["folder"]["top1"] == trained.best
    words = ("evaluate", "--run", trained.run_dir, f"OUTPUT_DIR={tmp_path / 'words'}")
    assert "test set folder loss" in succeeds(*words)
    assert (tmp_path / "words/eval/results.json").is_file()
    assert "val set folder loss" in succeeds(*words, "--part", "val")
    with pytest.raises(ValueError, match="unknown part 'tests'; did you mean 'test'"):
        vil.evaluate(trained.run_dir, output_dir=tmp_path, part="tests")


def test_resuming_a_finished_run_repeats_nothing_unless_results_are_missing(trained):
    folder = trained.run_dir
    file = folder / "test_results.json"
    file.write_text(file.read_text().replace('"count": 10', '"count": 11'))
    again = vil.train(output_dir=folder, resume=True)
    assert again.test_metrics["folder"]["count"] == 11  # was read
    text = file.read_text()
    file.write_text(text.replace('"count": 11', '"count": {"cat": [null]}'))  # stands for NaN
    again = vil.train(output_dir=folder, resume=True)
    assert math.isnan(again.test_metrics["folder"]["count"]["cat"][0])
    file.write_text("[3]")
    again = vil.train(output_dir=folder, resume=True)
    assert again.test_metrics == trained.test_metrics
    file.unlink()  # as if the run was killed before
    again = vil.train(output_dir=folder, resume=True)
    assert again.test_metrics == trained.test_metrics
    assert len(metrics(folder, "test/")) == 1
    assert saved(folder)["metrics"] == trained.test_metrics
    file.write_text(file.read_text().replace('"folder": {', '"others": {'))  # of another DATA.TEST
    again = vil.train(output_dir=folder, resume=True)
    assert again.test_metrics == saved(folder)["metrics"] == trained.test_metrics


@pytest.mark.long
def test_a_run_stopped_in_the_final_test_is_finished_on_resuming(pets, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def stop(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_best(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("vil.workflows.train.evaluate_best", stop)
        with pytest.raises(vil.errors.StoppedError):
            vil.train(None, SETS, data=pets, output_dir=folder)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["code"]) == ("preempted", 75)
    result = vil.train(output_dir=folder, resume=True)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["code"], status["step"]) == ("finished", 0, result.step)
    (line,) = result.history("test/folder")
    assert line["top1"] == result.test_metrics["folder"]["top1"]


@pytest.mark.long
def test_two_processes_give_the_same_metrics(pets, trained, tmp_path):
    words = ("--data", pets, "--run", trained.run_dir, "--output_dir", tmp_path)
    torchrun(
        2, ["train", *SETS, "--data", pets, "--output_dir", tmp_path / "two"], ["evaluate", *words]
    )
    assert json.loads((tmp_path / "eval/results.json").read_text()) == trained.test_metrics
    assert saved(tmp_path / "two")["metrics"]["folder"]["count"] == 10


def test_missing_test_images_end_the_run_before_its_first_step(pets, tmp_path):
    words = [word for word in SETS if not word.startswith("DATA.FOLD")]
    with pytest.raises(
        vil.errors.DataError, match="no folder test: .* train with DATA.TEST_FRACTION"
    ):
        vil.train(None, words, data=pets, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
