"""Weights of a detector that are not finite are refused."""

import pytest
import torch
from safetensors.torch import save_file

from tests.common.detection.detectors import detector
from vil.tasks.detection.models.weights import load_detector
from vil.utils.errors import CheckpointError


@pytest.mark.trust(5)
@pytest.mark.parametrize("part", ["body", "head"])
def test_weights_that_are_not_finite_are_refused(tmp_path, part):
    model = detector("retinanet")
    name = next(n for n, _ in model.named_parameters() if ("body" in n) is (part == "body"))
    with torch.no_grad():
        dict(model.named_parameters())[name].flatten()[0] = float("nan")
    save_file(model.state_dict(), tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has NaN or infinite values"):
        load_detector(detector("retinanet"), tmp_path / "bad.safetensors")
