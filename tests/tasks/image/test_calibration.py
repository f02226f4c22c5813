"""Temperature scaling, against a known temperature."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, Batch
from vil.tasks.image.calibration import MAX_TEMPERATURE, fit_temperature
from vil.utils.errors import ConfigError, DivergedError

pytestmark = pytest.mark.smoke


def sampled(num_images, temperature, num_classes=6):
    """Logits that are too large by a factor, and classes sampled from the true probabilities."""
    torch.manual_seed(0)
    logits = torch.randn(num_images, num_classes, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(dim=1), 1)[:, 0]
    return temperature * logits, targets


def task_on(logits, targets, **settings):
    batch = Batch(logits[:, :, None, None], targets, torch.arange(len(targets)))
    return ClassificationTask(device=CPU, test_sets={"set": [batch]}, num_classes=6, **settings)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_is_found(temperature):
    logits, targets = sampled(20_000, temperature)
    found = fit_temperature(logits.numpy(), targets.numpy())
    assert found == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("scale", [1, 1000])
def test_a_model_without_errors_or_without_information_has_a_finite_temperature(scale, caplog):
    logits = scale * np.eye(4)
    assert fit_temperature(logits, np.arange(4)) == 1
    assert "all images are predicted correctly" in caplog.text
    wrong = fit_temperature(logits, np.arange(4)[::-1])
    assert wrong == pytest.approx(MAX_TEMPERATURE, rel=1e-3)


def test_calibration_changes_probabilities_but_not_predictions():
    logits, targets = sampled(2000, 4.0)
    task, model = task_on(logits, targets), nn.Flatten()
    before, calibration = task.evaluate(model)["set"], task.calibrate(model)
    assert calibration.keys() == {"temperature", "test_set", "images"}
    assert task.evaluate(model)["set"] == before  # not applied yet
    task.apply_calibration(calibration)
    after = task.evaluate(model)["set"]
    assert after["ece"] < before["ece"] / 4
    assert after["loss"] < before["loss"]
    assert [after[name] for name in ("top1", "top5", "macro_f1")] == [
        before[name] for name in ("top1", "top5", "macro_f1")
    ]
    images = logits[:3, :, None, None]
    wanted = (logits[:3].float() / calibration["temperature"]).softmax(dim=1)
    torch.testing.assert_close(task.run(model, list(images)), wanted)
    task.apply_calibration({})
    assert task.evaluate(model)["set"] == before


def test_what_cannot_be_calibrated_is_refused():
    logits, targets = sampled(5, 1.0)
    with pytest.raises(DivergedError, match="outputs of the model are NaN or infinite"):
        task_on(logits * math.nan, targets).calibrate(nn.Flatten())
    mapping = torch.eye(6, dtype=torch.bool)
    with pytest.raises(ConfigError, match="cannot calibrate on test set"):
        task_on(logits, targets, class_mapping={"set": mapping}).calibrate(nn.Flatten())
