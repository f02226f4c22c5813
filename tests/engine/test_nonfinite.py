"""Steps with a non-finite loss or gradient are skipped on all ranks, and counted."""

import json

import pytest
import torch
from torch import nn

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, ToyLoader, metrics, saved_state, toy_train, weights
from vil.engine.loop import Loss
from vil.engine.nonfinite import (
    BatchNormSnapshot,
)
from vil.utils.errors import DivergedError

pytestmark = pytest.mark.smoke

BAD = torch.tensor(1.0)
TEST_SETS = {"train": list(ToyLoader().batches(0, 2))}


class Poisoned(ClassificationTask):
    """The loss of some steps is multiplied by NaN or infinity."""

    def __init__(self, steps, poison=float("nan"), **settings):
        super().__init__(device=CPU, num_classes=7, test_sets=TEST_SETS, **settings)
        self.steps, self.poison = steps, poison

    def loss(self, model, batch):
        loss, *rest = super().loss(model, batch)
        return Loss(loss * self.poison if batch.step in self.steps else loss, *rest)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "qhm"])  # fused by torch, timm's, ours
def test_a_bad_step_changes_neither_weights_nor_optimizer_nor_average(tmp_path, poison, optimizer):
    options = dict(optimizer=optimizer, ema=0.9, clip_grad=1.0, save_steps=1, keep=9, log_freq=1)
    state = toy_train(tmp_path / "bad", task=Poisoned({4, 5}, poison), **options, max_steps=6)
    assert (state.step, state.skipped) == (6, 2)
    toy_train(tmp_path / "good", task=Poisoned({}), **options, max_steps=4)
    for file in ("model.safetensors", "ema.safetensors"):
        ours, theirs = weights(tmp_path / "bad", file), weights(tmp_path / "good", file)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (
        saved_state(tmp_path / "bad")["optimizer"],
        saved_state(tmp_path / "good")["optimizer"],
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    lines = [m for m in metrics(tmp_path / "bad") if m["split"] == "train"]
    assert [m.get("skipped") for m in lines] == [None] * 4 + [1, 2]
    assert [m["loss"] is None for m in lines] == [False] * 4 + [True, True]


def test_the_mean_loss_is_that_of_the_steps_not_skipped(tmp_path):
    toy_train(tmp_path / "bad", task=Poisoned({2}), max_steps=3, dropout=0.0)
    toy_train(tmp_path / "good", task=Poisoned({}), max_steps=2, log_freq=2, dropout=0.0)
    ours, theirs = (metrics(tmp_path / name)[0]["loss"] for name in ("bad", "good"))
    assert ours == pytest.approx(theirs)


def test_too_many_in_a_row_end_the_run_and_leave_a_dump(tmp_path):
    with pytest.raises(DivergedError, match="3 steps in a row, up to step 8") as caught:
        toy_train(tmp_path, task=Poisoned({2, 3, 5, 6, 7}), max_bad_steps=2)
    assert caught.value.exit_code == 5
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["code"], status["step"]) == ("failed", 5, 7)
    assert status["checkpoint"].endswith("step-00000005")
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())
    found = json.loads((tmp_path / "crash/not-finite-rank0.json").read_text())
    batch = next(ToyLoader().batches(7, 8))
    assert (found["step"], found["samples"]) == (8, batch.indices.tolist())
    assert found["scale"] == 1.0
    assert set(found["largest"]) == {"1.weight", "1.bias", "4.weight", "4.bias"}


def test_float16_counts_its_overflows_and_lowers_the_scale(tmp_path):
    task = Poisoned({3}, float("inf"), amp_dtype=torch.float16)
    state = toy_train(tmp_path, task=task, max_steps=5)
    assert (state.skipped, saved_state(tmp_path)["scaler"]["scale"]) == (1, 2.0**15)


def test_epochs_of_one_step_survive_overflows(tmp_path):
    options = dict(loader=ToyLoader(steps_per_epoch=1), epochs=7)
    half = Poisoned({0, 1, 2, 3}, float("inf"), amp_dtype=torch.float16)
    assert toy_train(tmp_path / "half", task=half, **options).skipped == 4
    assert toy_train(tmp_path / "single", task=Poisoned({2}), **options).skipped == 1
    with pytest.raises(DivergedError, match="2 steps in a row"):
        toy_train(tmp_path / "diverged", task=Poisoned({2, 3}), **options)


def test_batch_norms_are_restored_after_a_skipped_step():
    model = nn.BatchNorm1d(3)
    snapshot = BatchNormSnapshot(model)
    snapshot.keep()
    model(torch.full((4, 3), float("nan")))
    assert model.running_mean.isnan().all()
    snapshot.restore(BAD)
    assert torch.equal(model.running_mean, torch.zeros(3))
    assert model.num_batches_tracked == 0
    snapshot.keep()
    model(torch.ones(4, 3))
    snapshot.restore(1 - BAD)
    assert model.num_batches_tracked == 1
