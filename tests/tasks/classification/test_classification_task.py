"""Loss and evaluation of classification, against sums done by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.common.toy_engine import CLASSES, CPU, Batch, pick, samples, toy_model
from vil.tasks.classification.task import ClassificationTask
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke


def task_on(*batches, num_classes=CLASSES, **settings):
    return ClassificationTask(
        device=CPU, test_sets={"set": batches}, num_classes=num_classes, **settings
    )


def batch_of(logits, targets):
    """Images that a flattening model turns into these logits."""
    logits = torch.as_tensor(logits, dtype=torch.float64)
    return Batch(logits[:, :, None, None], torch.as_tensor(targets), torch.arange(len(logits)))


def test_counts_by_hand_with_batches_of_odd_sizes():
    first = batch_of([[6, 5, 4, 3, 2, 1, 0]] * 3, [0, 4, 5])  # top-1, top-5, neither
    second = batch_of([[0, 1, 2, 3, 4, 5, 6]], [6])
    figures = task_on(first, second, per_class=True).evaluate(nn.Flatten())["set"]
    assert (figures["top1"], figures["top5"], figures["count"]) == (50.0, 75.0, 4)
    assert figures["per_class"]["right"] == [1, 0, 0, 0, 0, 0, 1]
    assert figures["per_class"]["count"] == [1, 0, 0, 0, 1, 1, 1]
    normaliser = math.log(sum(math.exp(logit) for logit in range(7)))
    assert figures["loss"] == pytest.approx(normaliser - (6 + 2 + 1 + 6) / 4, rel=1e-12)


@pytest.mark.defect("B21")
def test_fewer_than_five_classes():
    figures = task_on(batch_of([[2, 1, 0], [2, 1, 0]], [0, 2]), num_classes=3).evaluate(
        nn.Flatten()
    )
    assert (figures["set"]["top1"], figures["set"]["top5"]) == (50.0, 100.0)


@pytest.mark.defect("B21")
@pytest.mark.parametrize("size", [1, 7, 361])
def test_figures_do_not_depend_on_the_batch_size(size):
    data, model = samples(361), toy_model()
    batches = [pick(data, part) for part in torch.arange(361).split(size)]
    figures = task_on(*batches).evaluate(model)["set"]
    logits = model(data.images)
    assert figures["loss"] == pytest.approx(F.cross_entropy(logits, data.targets).item(), rel=1e-12)
    assert figures["top1"] == 100 * (logits.argmax(dim=1) == data.targets).sum().item() / 361


def test_evaluation_is_plain_cross_entropy_without_dropout_or_gradients():
    data, model = samples(20), toy_model(dropout=0.9)
    task = task_on(data, label_smoothing=0.3, mix=lambda batch: pytest.fail("mixed in evaluation"))
    figures = task.evaluate(model)["set"]
    expected = F.cross_entropy(toy_model()(data.images), data.targets).item()
    assert figures["loss"] == pytest.approx(expected, rel=1e-12)
    assert model.training
    assert task.evaluate(model.eval())
    assert not model.training


def test_an_empty_test_set_is_an_error():
    with pytest.raises(DataError, match="set has no readable image"):
        task_on().evaluate(toy_model())


def test_hard_targets_are_smoothed_in_training():
    data, model = samples(20), toy_model()
    loss, _, figures = task_on(label_smoothing=0.2).loss(model, data)
    log_p = model(data.images).log_softmax(dim=1)
    by_hand = -0.8 * log_p[range(20), data.targets].mean() - 0.2 * log_p.mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-12)
    right = (log_p.argmax(dim=1) == data.targets).sum().item()
    assert figures["top1"].item() == pytest.approx(100 * right / 20)


def test_soft_targets_are_not_smoothed_again_and_count_by_their_largest_class():
    data, model = samples(20), toy_model()
    soft = 0.7 * F.one_hot(data.targets, CLASSES) + 0.3 / CLASSES
    task = task_on(label_smoothing=0.2, mix=lambda b: Batch(b.images, soft.float(), b.indices))
    loss, _, figures = task.loss(model, task.prepare(data))
    by_hand = -(soft * model(data.images).log_softmax(dim=1)).sum(dim=1).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss.requires_grad
    assert figures["top1"] == task_on().loss(model, data).metrics["top1"]


@pytest.mark.defect("B4")
def test_autocast_and_memory_format_reach_the_model():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, CLASSES)

        def forward(self, images):
            logits = self.head(images.flatten(1))
            seen.append((images.is_contiguous(memory_format=torch.channels_last), logits.dtype))
            return logits

    data = samples(4)
    batch = Batch(data.images.float(), data.targets, data.indices)
    task = task_on(batch, amp_dtype=torch.bfloat16, memory_format=torch.channels_last)
    figures = task.evaluate(Spy())["set"]
    assert seen == [(True, torch.bfloat16)]
    assert math.isfinite(figures["loss"])
