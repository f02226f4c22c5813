"""Loss and evaluation of classification, against sums done by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sklearn
from torch import nn

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CLASSES, CPU, Batch, pick, samples, toy_model
from vil.tasks.image.class_metrics import metric_names
from vil.tasks.image.classes import score

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
    batch = batch_of([[2, 1, 0], [2, 1, 0]], [0, 2])
    figures = task_on(batch, num_classes=3).evaluate(nn.Flatten())["set"]
    assert figures["top1"] == 50.0
    assert "top5" not in figures


@pytest.mark.defect("B21")
@pytest.mark.parametrize("size", [1, 7, 361])
def test_metrics_do_not_depend_on_the_batch_size(size):
    data, model = samples(361), toy_model()
    batches = [pick(data, part) for part in torch.arange(361).split(size)]
    figures = task_on(*batches).evaluate(model)["set"]
    logits = model(data.images)
    assert figures["loss"] == pytest.approx(F.cross_entropy(logits, data.targets).item(), rel=1e-12)
    assert figures["top1"] == 100 * (logits.argmax(dim=1) == data.targets).sum().item() / 361


def test_metrics_are_those_of_scikit_learn():
    data, model = samples(361), toy_model()
    data.targets[data.targets == 3] = 4  # no image of class 3
    figures = task_on(data, per_class=True).evaluate(model)["set"]
    assert list(figures) == [
        "loss", "top1", "top5", "balanced_accuracy", "macro_precision", "macro_recall", "macro_f1",
        "auroc", "average_precision", "ece", "count", "per_class",
    ]  # fmt: skip
    labels = [0, 1, 2, 4, 5, 6]
    probabilities = model(data.images).float().softmax(dim=1).detach().numpy()
    targets, predicted = data.targets.numpy(), probabilities.argmax(axis=1)
    options = dict(labels=labels, average="macro", zero_division=0)
    columns = sklearn.precision_recall_fscore_support(targets, predicted, **options)
    for name, value in zip(("macro_precision", "macro_recall", "macro_f1"), columns):
        assert figures[name] == pytest.approx(100 * value)
    assert figures["balanced_accuracy"] == figures["macro_recall"]
    for name, metric in (
        ("auroc", sklearn.roc_auc_score),
        ("average_precision", sklearn.average_precision_score),
    ):
        values = [metric(targets == k, probabilities[:, k]) for k in labels]
        assert figures[name] == pytest.approx(100 * sum(values) / 6)
        assert figures["per_class"][name][4] == pytest.approx(100 * values[3])
        assert math.isnan(figures["per_class"][name][3])
    assert 0 < figures["ece"] < 100


@pytest.mark.parametrize("num_classes", [100, 101])
def test_many_classes_have_no_metrics_of_all_probabilities(num_classes):
    data = batch_of(torch.randn(40, num_classes).tolist(), torch.arange(40).tolist())
    figures = task_on(data, num_classes=num_classes).evaluate(nn.Flatten())["set"]
    assert list(figures) == metric_names(num_classes)
    assert ("auroc" in figures) == (num_classes == 100)


def test_a_model_without_numbers_is_measured():
    figures = task_on(batch_of([[math.nan] * 7] * 3, [0, 1, 2])).evaluate(nn.Flatten())["set"]
    assert all(math.isnan(figures[name]) for name in metric_names(7) if name != "count")


def test_equal_logits_rank_classes_in_order_as_in_predictions():
    scores = score(torch.zeros(6, 40, dtype=torch.bfloat16), torch.arange(6))
    assert scores.predicted.tolist() == [0] * 6
    assert scores.top5.tolist() == [True] * 5 + [False]


def test_evaluation_is_plain_cross_entropy_without_dropout_or_gradients():
    data, model = samples(20), toy_model(dropout=0.9)
    task = task_on(data, label_smoothing=0.3, mix=lambda batch: pytest.fail("mixed in evaluation"))
    figures = task.evaluate(model)["set"]
    expected = F.cross_entropy(toy_model()(data.images), data.targets).item()
    assert figures["loss"] == pytest.approx(expected, rel=1e-12)
    assert model.training
    assert task.evaluate(model.eval())
    assert not model.training


def test_a_collapse_on_any_of_the_sets_is_a_hint():
    same, several = batch_of([[1, 0], [1, 0]], [0, 1]), batch_of([[1, 0], [0, 1]], [0, 1])
    task = task_on(same, num_classes=2)
    task.class_names = ["cat", "dog"]
    task.test_sets["other"] = [several]
    task.evaluate(nn.Flatten())
    assert "the same class (cat) for all images of set" in task.hint
    task.test_sets["set"] = [several]
    task.evaluate(nn.Flatten())
    assert task.hint == ""


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
