"""Weights spread over the ranks are trained, saved and resumed as whole ones are."""

import pytest
import torch
from engine_toy import launch, metrics, toy_train
from safetensors.torch import load_file

from vil.engine.state import pointer

OPTIONS = {"ema": 0.8, "clip_grad": 0.1, "save_steps": 1}
FILES = ("model.safetensors", "ema.safetensors")


def weights(folder, file):
    return load_file(pointer(folder / "checkpoints", "last") / file)


def momenta(folder):
    saved = torch.load(pointer(folder / "checkpoints", "last") / "state.pt", weights_only=True)
    return saved["optimizer"]


def assert_close(folder, other, rtol=1e-6):
    for file in FILES:
        torch.testing.assert_close(
            weights(folder, file), weights(other, file), rtol=rtol, atol=1e-9
        )
    torch.testing.assert_close(momenta(folder), momenta(other), rtol=rtol, atol=1e-9)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    launch(2, folder, {**OPTIONS, "fsdp": True})
    return folder


def test_ten_steps_are_those_of_ddp(sharded, tmp_path):
    launch(2, tmp_path, OPTIONS)
    assert_close(sharded, tmp_path)
    figures = [
        [(m["step"], m["split"], m.get("top1")) for m in metrics(f)] for f in (sharded, tmp_path)
    ]
    assert figures[0] == figures[1]


def test_a_run_that_was_stopped_twice_is_the_same_bit_for_bit(sharded, tmp_path):
    for stop in (3, 7, None):
        launch(2, tmp_path, {**OPTIONS, "fsdp": True, "max_steps": stop})
    assert_close(tmp_path, sharded, rtol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_other_optimizers(optimizer, tmp_path):
    for name, fsdp in (("fsdp", True), ("ddp", False)):
        launch(2, tmp_path / name, {**OPTIONS, "optimizer": optimizer, "fsdp": fsdp})
    assert_close(tmp_path / "fsdp", tmp_path / "ddp")


def test_one_process_goes_on_where_two_with_spread_weights_stopped(tmp_path):
    launch(2, tmp_path / "both", {**OPTIONS, "fsdp": True, "max_steps": 5})
    toy_train(tmp_path / "both", dropout=0.0, **OPTIONS)
    toy_train(tmp_path / "alone", dropout=0.0, **OPTIONS)
    assert_close(tmp_path / "both", tmp_path / "alone")


def test_a_rank_whose_loss_is_no_number_stops_the_step_of_all(tmp_path):
    faults = {"poisoned_rank": 1, "poisoned_steps": [2, 6]}
    launch(2, tmp_path, {**OPTIONS, "fsdp": True, **faults})
    assert [m["skipped"] for m in metrics(tmp_path) if m["split"] == "train"][-1] == 2
    assert all(x.isfinite().all() for file in FILES for x in weights(tmp_path, file).values())
