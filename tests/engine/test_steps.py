"""The loop's options: accumulation, clipping, averaged weights and learning-rate drops.

`set_progress` is called at the start of a step, when the gradients are still those of the last one.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CLASSES, CPU, held_out, metrics, toy_train, weights
from tests.engine.test_early_stopping import scripted
from vil.engine.checkpoint.save_load import resolve_link

pytestmark = pytest.mark.smoke


def assert_close(ours, theirs):
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-9)


def assert_equal(ours, theirs):
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def task_on(batches, **settings):
    return ClassificationTask(
        device=CPU, test_sets={"set": batches}, num_classes=CLASSES, **settings
    )


def mix(batch):
    """Mix every image with its mirror in the batch, in a ratio from torch's generator."""
    ratio = torch.rand(())
    images = ratio * batch.images + (1 - ratio) * batch.images.flip(0)
    classes = F.one_hot(batch.targets, CLASSES).double()
    return dataclasses.replace(
        batch, images=images, targets=ratio * classes + (1 - ratio) * classes.flip(0)
    )


@pytest.mark.parametrize("parts", [2, 4, 12])
@pytest.mark.parametrize("settings", [{"mix": mix}, {"label_smoothing": 0.1}], ids=["soft", "hard"])
def test_accumulated_parts_equal_the_full_batch(tmp_path, parts, settings):
    for folder, accumulate in (("whole", 1), ("parts", parts)):
        toy_train(
            tmp_path / folder,
            task=task_on(held_out(5), **settings),
            dropout=0.0,
            epochs=1,
            clip_grad=0.2,
            accumulate=accumulate,
        )
    assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    for ours, theirs in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole")):
        for name in {"loss", "top1", "grad_norm"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6)
        assert theirs.get("grad_norm", 1) > 0.2  # there was something to clip


@pytest.mark.parametrize("amp_dtype", [None, torch.float16])
def test_gradients_are_clipped_to_the_norm_after_unscaling(tmp_path, amp_dtype):
    def norms(folder, **options):
        seen = []

        def watch(model, progress):
            if progress.step == 1:
                seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

        toy_train(
            tmp_path / folder,
            task=task_on(held_out(5), amp_dtype=amp_dtype),
            dropout=0.0,
            max_steps=2,
            log_freq=1,
            set_progress=watch,
            **options,
        )
        return seen[0], metrics(tmp_path / folder)[0].get("grad_norm")

    free, logged = norms("free", clip_grad=0.0)
    assert logged == pytest.approx(free, rel=1e-3)
    assert norms("high", clip_grad=10 * free) == pytest.approx((free, free), rel=1e-3)
    assert norms("low", clip_grad=free / 3) == pytest.approx((free / 3, free), rel=1e-3)


# ------------------------------------------------------------------------------- averaged weights


def test_an_average_is_evaluated_saved_and_resumed_bit_for_bit(tmp_path):
    straight, stopped, plain = (tmp_path / name for name in ("straight", "stopped", "plain"))
    toy_train(straight, ema=0.7)
    for stop in (3, 7, None):
        toy_train(stopped, ema=0.7, max_steps=stop)
    toy_train(plain)
    for file in ("model.safetensors", "ema.safetensors"):
        assert_equal(weights(stopped, file), weights(straight, file))
    assert_equal(weights(straight), weights(plain))  # the average changes no training
    average, model = weights(straight, "ema.safetensors"), weights(straight)
    assert average.keys() == model.keys()
    assert not torch.equal(average["1.weight"], model["1.weight"])

    def losses(folder):
        return [m["loss"] for m in metrics(folder) if m["split"] == "val/odd"]

    assert losses(straight) != losses(plain)


def test_an_average_can_be_switched_on_and_off(tmp_path, capsys):
    toy_train(tmp_path, max_steps=3)
    before = weights(tmp_path)
    assert not list(tmp_path.glob("checkpoints/*/ema.safetensors"))
    toy_train(tmp_path, max_steps=4, ema=0.5)
    assert (
        "no averaged weights: the average starts from the loaded weights" in capsys.readouterr().out
    )
    after = weights(tmp_path)
    expected = {name: (before[name] + after[name]) / 2 for name in after}
    assert_close(weights(tmp_path, "ema.safetensors"), expected)
    toy_train(tmp_path, max_steps=5)
    assert "has averaged weights, which are ignored" in capsys.readouterr().out
    assert not (resolve_link(tmp_path / "checkpoints", "last") / "ema.safetensors").exists()


# -------------------------------------------------------------------------- learning-rate drops


def learning_rates(folder):
    return [m["lr"] for m in metrics(folder) if m["split"] == "train"]


def test_the_learning_rate_drops_after_each_evaluation_that_is_not_the_best(tmp_path):
    values = [1.0, 0.5, 2.0, 2.0, 3.0]
    options = {"epochs": 5, "log_freq": 5, "dropout": 0.0}
    toy_train(tmp_path / "free", task=scripted(*values), **options)
    state = toy_train(tmp_path / "drops", task=scripted(*values), drop_on_plateau=4.0, **options)
    dropped, free = (learning_rates(tmp_path / name) for name in ("drops", "free"))
    factors = [ours / theirs for ours, theirs in zip(dropped, free)]
    assert factors == pytest.approx([1, 1, 1 / 4, 1 / 4, 1 / 16])
    assert (state.drops, state.best, state.best_step) == (2, 3.0, 25)

    def crash(model, progress):
        if progress.step == 22:
            raise KeyboardInterrupt

    folder, options = tmp_path / "crashed", {**options, "drop_on_plateau": 4.0}
    with pytest.raises(KeyboardInterrupt):
        toy_train(folder, task=scripted(*values), set_progress=crash, **options)
    assert toy_train(folder, task=scripted(*values[4:]), **options) == state
    assert learning_rates(folder) == learning_rates(tmp_path / "drops")
    assert_equal(weights(folder), weights(tmp_path / "drops"))
