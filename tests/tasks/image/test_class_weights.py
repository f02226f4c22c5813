"""Rare classes: weights in the loss, balanced sampling, logit adjustment."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from tests.common.class_task import ClassificationTask
from tests.common.small_runs import TINY
from vil.data.batch import Batch
from vil.data.samplers import balanced_order, train_batches
from vil.engine.loop import backward
from vil.tasks.image.class_weights import balance_classes, balance_labels, logit_shifts
from vil.tasks.image.losses import bce, focal, sigmoid, xentropy
from vil.utils.errors import DataError

CPU = torch.device("cpu")
RARE = np.array([0] * 90 + [1] * 6 + [3] * 11)  # no image of class 2


def test_balanced_weights_are_those_of_scikit_learn():
    targets = np.repeat([0, 1, 2], [70, 25, 5])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    np.testing.assert_allclose(balance_classes(targets, 3), expected)
    weights = balance_classes(RARE, 4)
    assert weights[2] == 0
    assert np.isclose(weights[RARE].mean(), 3 / 4)  # over the classes that have images


def test_balanced_labels_are_negatives_per_positive():
    targets = np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 1]], np.float32)
    np.testing.assert_allclose(balance_labels(targets, 4), [1 / 3, 3, 1, 1])


def test_balanced_order_draws_every_class_equally_often():
    order = balanced_order(RARE, seed=1, epoch=2)
    assert len(order) == len(RARE)
    counts = np.bincount(RARE[order], minlength=4)
    assert counts[2] == 0
    assert counts[[0, 1, 3]].max() - counts[[0, 1, 3]].min() <= 1
    of_rare = np.unique(order[RARE[order] == 1], return_counts=True)[1]
    assert len(of_rare) == 6
    assert of_rare.max() - of_rare.min() <= 1
    assert np.unique(order[RARE[order] == 0]).size == counts[0]  # without replacement
    assert (order == balanced_order(RARE, 1, 2)).all()
    assert (order != balanced_order(RARE, 1, 3)).any()


def test_balanced_batches_repeat_each_sample_in_a_row():
    order = balanced_order(RARE, seed=1, epoch=2)
    (batch,) = train_batches(
        len(RARE), batch_size=len(RARE), start=2, stop=3, seed=1, repeats=3, balance=RARE
    )
    assert [p.index for p in batch] == [order[i // 3] for i in range(len(RARE))]


def test_balanced_batches_are_the_same_from_any_step_and_for_any_number_of_ranks():
    def positions(**options):
        batches = train_batches(len(RARE), stop=40, balance=RARE, **options)
        return [[position.index for position in batch] for batch in batches]

    everything = positions(batch_size=8, start=0)
    assert positions(batch_size=8, start=17) == everything[17:]
    ranks = [positions(batch_size=4, start=0, rank=rank, world=2) for rank in (0, 1)]
    assert [a + b for a, b in zip(*ranks)] == everything


@pytest.mark.parametrize("loss", [xentropy, bce, sigmoid, focal])
@pytest.mark.parametrize("soft", [False, True])
def test_the_mean_of_the_losses_of_images_is_the_loss(loss, soft):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    targets = F.one_hot(targets, 4).double() * 0.7 + 0.075 if soft else targets
    losses = loss(logits, targets, 0.1, per_image=True)
    assert losses.shape == (5,)
    torch.testing.assert_close(losses.mean(), loss(logits, targets, 0.1))


def weighted(**settings) -> ClassificationTask:
    return ClassificationTask(device=CPU, num_classes=4, **settings)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_weighted_step_has_the_gradient_of_torchs_weighted_loss(parts):
    """Also if the step is split into parts of unequal weight."""
    torch.manual_seed(0)
    model, images = torch.nn.Linear(6, 4).double(), torch.randn(8, 6, dtype=torch.float64)
    targets, table = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3]), torch.tensor([0.2, 3, 1, 0.5])
    F.cross_entropy(model(images), targets, table.double()).backward()
    expected, model.weight.grad = model.weight.grad, None
    task = weighted(class_weights=table.double())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    metrics = backward(task, model, Batch(images, targets, torch.arange(8)), scaler, parts, CPU)
    torch.testing.assert_close(model.weight.grad, expected)
    torch.testing.assert_close(
        metrics["loss"], F.cross_entropy(model(images), targets, table.double()).detach()
    )


def test_weights_of_images_multiply_those_of_classes():
    task = weighted(class_weights=torch.tensor([1.0, 2, 4, 8]), image_weights=torch.arange(10.0))
    batch = Batch(torch.zeros(2, 1), torch.tensor([1, 3]), torch.tensor([5, 7]))
    model = torch.nn.Linear(1, 4)
    assert task.loss(model, batch).normalizer.item() == 10 + 56
    mixed = Batch(torch.zeros(1, 1), torch.tensor([[0.5, 0.5, 0, 0]]), torch.tensor([2]))
    assert task.loss(model, mixed).normalizer.item() == 3


def test_logit_adjustment_adds_log_frequencies():
    shifts = logit_shifts(np.array([0, 0, 0, 1]), ["a", "b"], 2.0)
    torch.testing.assert_close(shifts, 2 * torch.tensor([0.75, 0.25]).log())
    with pytest.raises(DataError, match="but 1 of 2 classes have none, such as b"):
        logit_shifts(np.array([0, 0]), ["a", "b"], 1.0)


def test_losses_and_mixup_that_cannot_be_weighted_are_refused():
    with pytest.raises(ValueError, match="no argument `per_image`"):
        weighted(loss=lambda logits, targets, smoothing: logits.sum(), class_weights=torch.ones(4))
    with pytest.raises(ValueError, match="set AUG.MIXUP_PROB to 0"):
        weighted(mix=lambda batch: batch, image_weights=torch.ones(4))


@pytest.mark.parametrize(
    "option",
    [
        pytest.param("DATALOADER.SAMPLER=balanced", marks=pytest.mark.long),
        pytest.param("LOSS.CLASS_WEIGHTS=balanced", marks=pytest.mark.long),
        pytest.param("LOSS.LOGIT_ADJUSTMENT=1", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_is_bit_identical(tmp_path, option):
    """After 3 of 8 steps and from the file, the weights are those of an uninterrupted run."""
    from safetensors.torch import load_file

    from vil.workflows.configure import make_config
    from vil.workflows.train import train_config

    def run(folder, **options):
        words = [*TINY, option, "RUN.SAVE_STEPS=3"]
        return train_config(make_config(None, words, output_dir=folder), **options)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", max_steps=3)
    resumed = run(tmp_path / "parts", resume=True)
    assert (whole.step, resumed.step) == (8, 8)
    weights = [load_file(r.last_checkpoint / "model.safetensors") for r in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
