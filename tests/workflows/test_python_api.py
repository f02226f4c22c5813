"""Runs from Python: several runs in one process, no global state
left behind, Ctrl-C, threads, and the command's sentences as exceptions."""

import json
import logging
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vil
from tests.common.small_runs import TINY
from vil.tasks.image.build import transform_settings
from vil.utils.global_state import preserve_global_state


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return vil.train(None, TINY, output_dir=tmp_path_factory.mktemp("runs") / "one")


def test_an_image_from_pil_is_read_like_its_file(trained, tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "cmyk.tif")
    Image.fromarray(pixels[..., 0] / np.float32(255)).save(tmp_path / "float.tif")
    Image.fromarray(pixels[..., 0].astype(np.int32)).save(tmp_path / "int.tif")
    files = sorted(tmp_path.glob("*.*"))
    run, overrides = trained.run_dir, {"DATA.VALUE_RANGE": [0, 255]}
    expected = vil.predict(run, files, overrides)
    found = list(vil.predict(run, map(Image.open, files), overrides))
    assert [each.classes for each in found] == [each.classes for each in expected]
    assert not any(each.error for each in found)
    hsv = Image.fromarray(pixels).convert("HSV")
    assert not next(vil.predict(run, hsv)).error


def final(result):
    return load_file(result.last_checkpoint / "model.safetensors")


def global_state():
    log = logging.getLogger("vil")
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "log": (log.level, list(log.handlers), log.propagate),
        "environment": dict(os.environ),
    }


def test_a_second_run_is_as_the_first_and_leaves_no_global_state(trained, tmp_path):
    before = global_state()
    second = vil.train(None, [*TINY, "DETERMINISTIC=True"], output_dir=tmp_path / "two")
    assert global_state() == before
    assert_same_weights(final(second), final(trained))


def test_draws_from_global_generators_do_not_reach_the_caller():
    """A plug-in may use them."""
    before = global_state()
    with preserve_global_state():
        random.random()
        np.random.random()
        torch.rand(1)
    assert global_state() == before


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_result_has_metrics_paths_and_the_model(trained):
    assert trained.status == "finished"
    (metrics,) = trained.metrics.values()
    assert metrics["top1"] == trained.best
    assert trained.best_checkpoint.parent == trained.run_dir / "checkpoints"
    assert trained.history()[-1]["step"] == trained.step
    state = trained.model.state_dict()
    assert all(state[name].equal(value) for name, value in final(trained).items())


def test_evaluate_and_predict_agree_with_the_run(trained):
    (test_set,) = trained.metrics
    assert vil.evaluate(trained.run_dir)[test_set]["top1"] == trained.best
    model = vil.load_for_inference(trained.run_dir)
    images = [np.full((40, 30, 3), 80, np.uint8), Image.new("RGB", (20, 50))]
    predictions = list(vil.predict(model, images))
    assert len(predictions) == 2
    probabilities = [share for _, share in predictions[0].classes]
    assert predictions[0].names == [model.classes[index] for index, _ in predictions[0].classes]
    assert sum(probabilities) <= 1 + 1e-6
    assert probabilities == sorted(probabilities, reverse=True)
    single = next(iter(vil.predict(trained.run_dir, images[1])))
    assert single.classes[0][0] == predictions[1].classes[0][0]


def test_a_run_is_resumed_with_its_config_however_its_folder_is_given(trained, monkeypatch):
    folder = str(trained.run_dir)
    assert vil.train(overrides={"OUTPUT_DIR": folder}, resume=True).step == trained.step
    monkeypatch.setenv("PT_OUTPUT_DIR", folder)
    assert vil.train(resume=True).step == trained.step


def test_folders_of_weights_are_evaluated(trained, tmp_path):
    best = vil.evaluate(trained.run_dir, output_dir=tmp_path)
    assert vil.evaluate(trained.best_checkpoint, output_dir=tmp_path) == best
    model = vil.load_for_inference(trained.run_dir)
    vil.save_pretrained(model.model, tmp_path / "hub", transform=transform_settings(model.cfg))
    (metrics,) = vil.evaluate(tmp_path / "hub", TINY, output_dir=tmp_path).values()
    assert metrics["top1"] == trained.best


def test_in_a_thread(tmp_path):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            vil.train(None, [*TINY, "OPTIM.EPOCHS=1"], output_dir=tmp_path / "run")
        )
    )
    thread.start()
    thread.join()
    assert results[0].status == "finished"


def test_one_thread_at_a_time_trains(tmp_path):
    """Two would draw from the same random generators."""
    refused = []

    def train_another():
        with pytest.raises(vil.errors.ConfigError, match="another thread of this process trains"):
            vil.train(None, TINY, output_dir=tmp_path / "another")
        refused.append(True)

    def evaluated(evaluation):
        thread = threading.Thread(target=train_another)
        thread.start()
        thread.join()

    vil.train(None, TINY, output_dir=tmp_path / "run", on_evaluation=evaluated)
    assert refused
    assert not (tmp_path / "another").exists()


def test_a_result_does_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = vil.train(None, [*TINY, "OPTIM.EPOCHS=1"], output_dir="run")
    monkeypatch.chdir("/")
    assert result.best_checkpoint.is_dir()
    assert result.history()[-1]["step"] == result.step


def test_ctrl_c_saves_and_returns(tmp_path, monkeypatch):
    """In a notebook: the state is there, and the run can be resumed."""
    from vil.engine import loop

    plain = loop.seed_step

    def interrupt(seed, step, rank):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        plain(seed, step, rank)

    monkeypatch.setattr(loop, "seed_step", interrupt)
    result = vil.train(None, TINY, output_dir=tmp_path / "run")
    assert (result.status, result.step) == ("interrupted", 3)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["code"]) == ("interrupted", 130)
    monkeypatch.setattr(loop, "seed_step", plain)
    assert vil.train(output_dir=tmp_path / "run", resume=True).status == "finished"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: vil.train(None, {"OPTIM.LRR": 1}), "ConfigError", "did you mean OPTIM.LR"),
        (lambda: vil.train(None, "OPTIM.LR=1"), "ConfigError", "expected a dict or a list"),
        (lambda: vil.train("nowhere.yaml"), "ConfigError", "nowhere.yaml"),
        (lambda: vil.evaluate("nowhere"), "CheckpointError", "no weights at nowhere"),
        (lambda: vil.load_for_inference("nowhere"), "CheckpointError", "no weights at nowhere"),
        (lambda: list(vil.predict("vil_nano", [])), "DataError", "no images"),
        (
            lambda: vil.train({"OPTIM.LR": 1}),
            "ConfigError",
            "config: expected a file, .*",
        ),
        (lambda: vil.train(None, 3), "ConfigError", "overrides: expected a dict or a list"),
        (lambda: vil.load_for_inference(None), "ConfigError", "source: expected .* got NoneType"),
        (lambda: vil.evaluate(torch.nn.Linear(1, 1)), "ConfigError", "source: .* got Linear"),
    ],
)
def test_errors_are_exceptions_with_the_commands_text(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(getattr(vil.errors, error), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: vil.train(None, {"OPTIM.LRR": 1}),
            "ConfigError",
            "^overrides: OPTIM.LRR",
        ),
        (lambda: vil.train(None, ["OPTIM.LRR=1"]), "ConfigError", "^overrides: OPTIM.LRR"),
        (lambda: vil.train("own/vil_nano_96.yaml", data="no"), "DataError", "no: set data to the"),
        (lambda: vil.train(None, imports=["no.py"]), "ConfigError", "^imports no.py: no such"),
        (lambda: vil.train(None, preset="no"), "ConfigError", "^preset: unknown preset"),
        (lambda: vil.train(None, TINY, output_dir="run"), "ConfigError", "add resume=True to"),
        (lambda: vil.predict("no*", "."), "ConfigError", "^source no\\*: no folder"),
        (lambda: vil.predict_out_of_fold(["no"]), "ConfigError", "^source no is not the folder"),
    ],
)
def test_errors_in_python_name_arguments_instead_of_flags(
    call, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints/step-1").mkdir(parents=True)
    with pytest.raises(getattr(vil.errors, error), match=message) as caught:
        call()
    assert "--" not in str(caught.value)


PIXELS = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (PIXELS / 255, r"expected a uint8 array \(H, W, 3\).* got float64 \(8, 8, 3\)"),
        (PIXELS.transpose(2, 0, 1), r"got uint8 \(3, 8, 8\)"),
        (np.stack([PIXELS, PIXELS]), r"or a list of them, got uint8 \(2, 8, 8, 3\)"),
        ([PIXELS, PIXELS.astype(int)], r"got int64 \(8, 8, 3\)"),
        (PIXELS[:0], r"got uint8 \(0, 8, 3\)"),
        (torch.zeros(3, 8, 8), r"uint8 arrays .*permute\(1, 2, 0\)\.numpy\(\), got Tensor"),
        ([torch.zeros(3, 8, 8)], r"got Tensor"),
        (None, "expected paths, PIL images or uint8 arrays .* got NoneType"),
        (b"jpeg", "got bytes"),
        ([3], "got int"),
        ("no.png", "there is no file or folder no.png"),
        (["no.png", "no"], "there is no file or folder no.png, no"),
    ],
)
def test_what_is_no_image_is_an_error_of_the_data(images, message, trained):
    model = vil.load_for_inference(trained.run_dir)
    for call in (vil.predict, vil.embed):
        with pytest.raises(vil.errors.DataError, match=message):
            call(model, images)


def test_arrays_and_tensors_are_values_of_overrides():
    cfg = vil.load_for_inference(
        "vil_nano",
        {"INPUT.MEAN": np.full(3, 0.25), "INPUT.STD": torch.full((3,), 0.5), "SEED": np.int64(3)},
    ).cfg
    assert (cfg.INPUT.MEAN, cfg.INPUT.STD, cfg.SEED) == ([0.25] * 3, [0.5] * 3, 3)
