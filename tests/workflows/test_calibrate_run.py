"""`vil evaluate --calibrate`, and the commands that use its result."""

import json
import shutil

import pytest

import vil as package
from tests.common.small_runs import checkpoint, results, succeeds, vil
from vil.workflows.calibration import find_checkpoint, read


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.long
def test_a_stored_calibration_is_used_for_its_checkpoint(run):
    plain = package.evaluate(run)["fake"]
    shown = succeeds("evaluate", "--run", run, "--calibrate")
    assert "calibrated on fake, 64 images: temperature " in shown
    assert f"loss {plain['loss']:.4f} before" in shown
    assert f"ece {plain['ece']:.2f} before" in shown
    stored = read(run / "calibration.json")
    assert stored["checkpoint"].startswith("step-")
    calibrated = results(run)["fake"]
    assert calibrated["loss"] == stored["after"]["loss"] < plain["loss"]
    assert calibrated["top1"] == plain["top1"]

    ended = vil("evaluate", "--run", run)
    assert results(run)["fake"] == calibrated
    assert f"calibrated with temperature {stored['temperature']:.4f} of {run}" in ended.err
    assert "calibrated" not in ended.out
    for source in (run, run / "checkpoints/best"):
        weights = ("--config-file", run / "config.yaml", f"MODEL.MODEL_PATH={source}")
        ended = vil("evaluate", *weights)
        assert f"calibrated with temperature {stored['temperature']:.4f} of {run}" in ended.err
    model = package.load_for_inference(run)
    assert model.task.target.temperature == stored["temperature"]
    assert "calibrated with temperature" in model.report

    succeeds("report", run)
    assert f"with temperature {stored['temperature']:.4f}" in (run / "report.html").read_text()

    again = package.evaluate(run, calibrate=True)["fake"]  # from the plain model, not twice
    assert again == calibrated


def test_the_calibration_of_another_checkpoint_is_not_used(run):
    text = json.dumps({"temperature": 2.0, "checkpoint": "step-00000001"})
    (run / "calibration.json").write_text(text)
    ended = vil("evaluate", "--run", run)
    assert "calibration.json is not used: it belongs to checkpoint step-00000001" in ended.err
    assert package.load_for_inference(run).task.target.temperature is None


def test_the_calibration_of_an_average_is_not_used_for_the_weights_beside_it(run):
    best = checkpoint(run, "best")
    shutil.copy(best / "model.safetensors", best / "ema.safetensors")
    for file, is_used in (("ema.safetensors", True), ("model.safetensors", False)):
        found = find_checkpoint(str(best / file), "", "keep")
        assert (found is not None) == is_used


@pytest.mark.parametrize("name", ["convert", pytest.param("export", marks=pytest.mark.long)])
def test_a_file_without_the_stored_calibration_is_announced(run, tmp_path, name):
    best = checkpoint(run, "best").name
    text = json.dumps({"temperature": 2.0, "checkpoint": best})
    (run / "calibration.json").write_text(text)
    words = {
        "convert": ("convert", run, tmp_path / "x.safetensors"),
        "export": ("export", "--run", run, "--out", tmp_path / "x.pt2"),
    }[name]
    ended = vil(*words)
    assert ended.code == 0, ended.err
    said = "the file is not calibrated: divide its logits by the temperature"
    assert (ended.out + ended.err).count(said) == 1


@pytest.mark.parametrize("text", ["", '{"temperature": -1, "checkpoint": "step-1"}'])
def test_a_file_that_is_no_calibration_is_refused(run, text):
    (run / "calibration.json").write_text(text)
    ended = vil("evaluate", "--run", run)
    assert ended.code == 4
    assert "calibration.json is not a valid calibration (" in ended.err
    assert "vil evaluate --calibrate" in ended.err
    assert vil("evaluate", "--run", run, "--calibrate").code == 0


def test_weights_without_a_run_cannot_be_calibrated(run, tmp_path):
    file = tmp_path / "file.safetensors"
    succeeds("convert", run, file)
    ended = vil("evaluate", "MODEL.MODEL_PATH", file, "--calibrate")
    assert (ended.code, ended.out) == (2, "")
    assert "--calibrate needs the checkpoint of a run: give --run DIR" in ended.err
