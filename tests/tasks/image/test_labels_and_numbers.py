"""Losses, metrics and thresholds of labels and of numbers as targets."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)

from vil.data.batch import Batch
from vil.data.dataset import fingerprint
from vil.data.datasets.digit_targets import DigitAngles, DigitSets
from vil.tasks.image.calibration import choose_thresholds
from vil.tasks.image.labels import Labels
from vil.tasks.image.losses import asymmetric
from vil.tasks.image.losses import label_bce as bce
from vil.tasks.image.numbers import Numbers
from vil.tasks.image.target import Outputs
from vil.tasks.image.task import ImageTask
from vil.utils.errors import DataError, DivergedError

CPU = torch.device("cpu")


def random_labels(seed=0, count=200):
    """Logits with many ties, and a label that no image has."""
    random = np.random.default_rng(seed)
    logits = random.integers(-6, 7, (count, 4)).astype(np.float32) / 3
    truth = (random.random((count, 4)) < [0.5, 0.1, 0.3, 0.0]).astype(np.float32)
    return Outputs(np.arange(count), truth, logits)


def test_multilabel_metrics_are_those_of_scikit_learn():
    outputs = random_labels()
    metrics = Labels(4).measure("set", outputs)
    truth, scores = outputs.targets[:, :3], torch.from_numpy(outputs.values).sigmoid().numpy()
    predicted = scores >= 0.5
    expected = 100 * average_precision_score(truth, scores[:, :3], average="macro")
    assert metrics["map"] == pytest.approx(expected)
    macro = 100 * f1_score(truth, predicted[:, :3], average="macro")
    assert metrics["macro_f1"] == pytest.approx(macro)
    micro = 100 * f1_score(outputs.targets, predicted, average="micro")
    assert metrics["micro_f1"] == pytest.approx(micro)
    exact = 100 * (predicted == outputs.targets).all(1).mean()
    assert metrics["exact"] == pytest.approx(exact)
    entropy = F.binary_cross_entropy_with_logits(
        torch.from_numpy(outputs.values), torch.from_numpy(outputs.targets)
    )
    assert metrics["loss"] == pytest.approx(entropy.item(), rel=1e-5)
    assert np.isnan(metrics["per_label"]["ap"][3])
    assert metrics["per_label"]["count"][3] == 0


def test_multilabel_metrics_of_nan_outputs_are_nan():
    outputs = random_labels()
    outputs.values[3, 1] = np.nan
    metrics = Labels(4).measure("set", outputs)
    assert all(np.isnan(metrics[name]) for name in ("map", "macro_f1", "micro_f1", "exact"))
    with pytest.raises(DivergedError, match="cannot calibrate"):
        choose_thresholds(outputs.targets > 0.5, outputs.values)


def test_a_threshold_is_above_0_for_probabilities_of_0():
    assert choose_thresholds(np.ones((2, 1), bool), np.zeros((2, 1), np.float32))[0] > 0


@pytest.mark.parametrize("seed", range(5))
def test_no_threshold_has_a_higher_f1(seed):
    outputs = random_labels(seed)
    truth, scores = outputs.targets > 0.5, torch.from_numpy(outputs.values).sigmoid().numpy()
    thresholds = choose_thresholds(truth, scores)
    assert thresholds[3] == 0.5
    for label in range(3):
        f1 = f1_score(truth[:, label], scores[:, label] >= thresholds[label])
        others = [f1_score(truth[:, label], scores[:, label] >= s) for s in np.unique(scores)]
        assert f1 == pytest.approx(max(others))


def test_asymmetric_loss_without_its_settings_is_the_binary_cross_entropy():
    logits = torch.linspace(-30, 30, 41, requires_grad=True)[:, None]
    for targets in (torch.zeros(41, 1), torch.ones(41, 1)):
        plain = asymmetric(logits, targets, gamma_pos=0, gamma_neg=0, clip=0)
        torch.testing.assert_close(plain, bce(logits, targets))
        gradient = torch.autograd.grad(asymmetric(logits, targets, gamma_neg=0.5).sum(), logits)[0]
        assert gradient.isfinite().all()
    weights = torch.tensor([3.0])
    torch.testing.assert_close(
        asymmetric(logits, torch.ones(41, 1), weights, gamma_neg=0, clip=0),
        bce(logits, torch.ones(41, 1), weights),
    )


def test_asymmetric_loss_ignores_negatives_below_the_clip():
    logits = torch.tensor([[-4.0]])  # probability 0.018
    assert asymmetric(logits, torch.zeros(1, 1), clip=0.05).item() < 1e-8
    assert bce(logits, torch.zeros(1, 1)).item() > 0.01


def test_regression_metrics_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    targets = random.normal(size=(50, 3)).astype(np.float32) * [1, 10, 0] + [0, 0, 0.3]
    values = (targets + random.normal(size=(50, 3))).astype(np.float32)
    numbers = Numbers(3, mean=[0, 1, 2], std=[1, 10, 1])
    metrics = numbers.measure("set", Outputs(np.arange(50), targets, values))
    mae = mean_absolute_error(targets, values, multioutput="raw_values")
    rmse = root_mean_squared_error(targets, values, multioutput="raw_values")
    np.testing.assert_allclose(metrics["per_number"]["mae"], mae, rtol=1e-6)
    np.testing.assert_allclose(metrics["per_number"]["rmse"], rmse, rtol=1e-6)
    r2 = r2_score(targets[:, :2], values[:, :2], multioutput="raw_values")
    np.testing.assert_allclose(metrics["per_number"]["r2"][:2], r2, rtol=1e-6)
    assert np.isnan(metrics["per_number"]["r2"][2])  # constant in the test set
    assert metrics["mae"] == pytest.approx(mae.mean())
    assert metrics["r2"] == pytest.approx(r2.mean())


@pytest.mark.parametrize("constant", [0.0, 0.3, 0.5, 1e9 + 0.1])
def test_a_number_that_is_constant_in_the_training_set_is_refused(constant):
    dataset = DigitAngles("", "train")
    dataset.classes = ["angle", "size"]
    dataset.targets = np.c_[dataset.targets, np.full(len(dataset), constant)]
    with pytest.raises(DataError, match=r"1 of 2 targets \(such as size\) are constant"):
        Numbers(2).read_targets(dataset)


@pytest.mark.parametrize("kind", ["huber", "mse", "mae"])
def test_regression_learns_in_standard_deviations(kind):
    task = ImageTask(Numbers(1, mean=[10.0], std=[2.0], loss=kind), device=CPU)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.zeros_(model.bias)
    batch = Batch(torch.tensor([[0.5]]), torch.tensor([[10.0]]), torch.tensor([0]))
    loss = task.loss(model, batch)
    expected = {"huber": 0.125, "mse": 0.25, "mae": 0.5}[kind]
    assert loss.value.item() == pytest.approx(expected)
    assert loss.metrics["mae"].item() == pytest.approx(1.0)
    assert task.compute_outputs(model, batch.images).item() == pytest.approx(11.0)
    task.image_weights = torch.tensor([3.0])
    assert task.loss(model, batch).value.item() == pytest.approx(3 * expected)


def test_large_numbers_that_differ_little_are_learned_and_restored_exactly():
    """In float32, times in seconds since 1970 are multiples of 128."""
    numbers = Numbers(1, mean=[1.7e9], std=[10.0], loss="mse")
    task = ImageTask(numbers, device=CPU)
    values = np.array([[1.7e9 + 1], [1.7e9 - 2]])
    batch = Batch(torch.tensor([[0.1], [-0.2]]), torch.from_numpy(values), torch.arange(2))
    model = torch.nn.Identity()
    loss = task.loss(model, batch)
    assert (loss.value.dtype, loss.value.item()) == (torch.float32, pytest.approx(0, abs=1e-12))
    outputs = task.run(model, list(batch.images))
    np.testing.assert_allclose(outputs.numpy() - 1.7e9, values - 1.7e9, rtol=1e-6)
    np.testing.assert_array_equal(task.average_outputs([outputs, outputs]), outputs)
    kept = numbers.evaluate_batch("set", batch.images, batch).columns
    assert numbers.measure("set", Outputs(*kept))["mae"] < 1e-5


def test_a_head_of_other_numbers_predicts_the_same_numbers():
    """The second of a model with two heads, such as one with a distillation token, too."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)).double()
    before, images = Numbers(2, mean=[1e6, 3e-4], std=[2e5, 1e-4]), torch.randn(3, 5).double()
    wanted = before.decode(model(images))
    after = Numbers(2, mean=[0.0, 1e-4], std=[1e6, 7e-4])
    after.rescale_head(model, [1e6, 3e-4], [2e5, 1e-4])
    torch.testing.assert_close(after.decode(model(images)), wanted)


def test_a_run_that_read_its_numbers_in_float32_is_resumed():
    data = DigitAngles(None, "val")
    before, data.targets = fingerprint(data), data.targets.astype(np.float64)
    assert fingerprint(data) == before


@pytest.mark.parametrize("data", [DigitAngles, DigitSets])
def test_digits_with_other_targets(data):
    train, val = data(None, "train"), data(None, "val")
    assert train.targets.shape == (len(train), len(train.classes))
    assert train.targets.dtype == np.float32
    first = train.image(0)
    assert first.tobytes() == data(None, "train").image(0).tobytes() != val.image(0).tobytes()
    assert train[5][1].shape == (len(train.classes),)
    if data is DigitSets:
        assert set(train.targets.sum(1)) <= {1, 2, 3, 4, 5}
        used = {int(i) for d in (train, val) for i in np.unique(d.cells)}
        assert not set(np.unique(train.cells)) & set(np.unique(val.cells)) - {-1}
        assert len(used) > 1500
