"""Sharded weights are trained, saved and resumed like unsharded ones."""

import shutil
from functools import partial

import pytest
import torch

from tests.common.toy_engine import launch, metrics, saved_state, toy_train, weights

pytestmark = pytest.mark.long

OPTIONS = {"ema": 0.8, "clip_grad": 0.1, "save_steps": 1}
FILES = ("model.safetensors", "ema.safetensors")


def assert_close(folder, other, rtol=1e-6):
    close = partial(torch.testing.assert_close, rtol=rtol, atol=1e-8 if rtol else 0)
    for file in FILES:
        close(weights(folder, file), weights(other, file))
    close(saved_state(folder)["optimizer"], saved_state(other)["optimizer"])


OPTIMIZERS = ("sgd", "adam", "lamb", "timm/lion", "timm/nadamw", "timm/adan")
# folder, options: one after the other in the same two processes
RUNS = (
    ("sharded", {"fsdp": True}),
    ("ddp", {}),
    *(("stopped", {"fsdp": True, "max_steps": stop}) for stop in (3, 7, None)),
    *((f"sharded {name}", {"fsdp": True, "optimizer": name}) for name in OPTIMIZERS),
    *((f"ddp {name}", {"optimizer": name}) for name in OPTIMIZERS),
    ("half", {"fsdp": True, "max_steps": 5}),
    ("poisoned", {"fsdp": True, "poisoned_rank": 1, "poisoned_steps": [2, 6]}),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharding")
    launch(2, *((root / folder, {**OPTIONS, **options}) for folder, options in RUNS))
    return root


def test_ten_steps_are_those_of_ddp(root):
    ours, theirs = root / "sharded", root / "ddp"
    assert_close(ours, theirs)
    figures = [
        [(m["step"], m["split"], m.get("top1")) for m in metrics(folder)]
        for folder in (ours, theirs)
    ]
    assert figures[0] == figures[1]


def test_a_run_that_was_stopped_twice_is_the_same_bit_for_bit(root):
    assert_close(root / "stopped", root / "sharded", rtol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_optimizers(optimizer, root):
    assert_close(root / f"sharded {optimizer}", root / f"ddp {optimizer}")
    with pytest.raises(AssertionError):
        assert_close(root / f"sharded {optimizer}", root / "ddp")


def test_one_process_resumes_the_sharded_run_of_two(root, tmp_path):
    shutil.copytree(root / "half", tmp_path / "both")
    toy_train(tmp_path / "both", dropout=0.0, **OPTIONS)
    toy_train(tmp_path / "alone", dropout=0.0, **OPTIONS)
    assert_close(tmp_path / "both", tmp_path / "alone")


def test_nan_on_one_rank_skips_the_step_on_all(root):
    folder = root / "poisoned"
    assert [m["skipped"] for m in metrics(folder) if m["split"] == "train"][-1] == 2
    assert all(x.isfinite().all() for file in FILES for x in weights(folder, file).values())
