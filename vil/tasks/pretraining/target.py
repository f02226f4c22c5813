"""Targets of pretraining: predictions are the features of the network.

Shapes: B images, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vil.tasks.image.predictions import Prediction, as_json
from vil.tasks.image.target import Target
from vil.tasks.pretraining.model import PretrainingModel


@dataclass(frozen=True)
class FeaturePrediction(Prediction):
    """The pooled features of one image, those of `vil embed`."""

    features: Sequence[float] = ()  # none if the image could not be read

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        return {"features": list(self.features)}


class FeatureTarget(Target):
    """Base class of the targets. Targets of the dataset are ignored."""

    target_type = ""  # any
    formats = {"json": as_json}
    prediction = FeaturePrediction
    output_name, activation = "features", "none"

    def predict(
        self, values: Tensor, files: Sequence[str], label: Callable[[int], str]
    ) -> list[FeaturePrediction]:
        rows = zip(files, values.tolist())
        return [FeaturePrediction(file, features=features) for file, features in rows]

    def describe(self, prediction: FeaturePrediction, label: Callable[[int], str]) -> list[str]:
        return []

    def for_export(self, model: nn.Module) -> nn.Module:
        """Return the body, which maps images to their pooled features."""
        return model.body if isinstance(model, PretrainingModel) else model
