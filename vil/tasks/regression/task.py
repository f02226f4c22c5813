"""The regression task: loss, evaluation with mean absolute error and R2, inference.

Shapes: B images, N images of a test set, K numbers per image. The network predicts normalized
numbers, with mean 0 and standard deviation 1 in the training set.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import compute_on_main
from vil.engine.loop import Loss, Metric
from vil.tasks.base import ImageMeta
from vil.tasks.image_task import ImageTask, Outputs, draw_lines
from vil.tasks.regression.output_formats import FORMATS, Prediction

LOSSES = {"huber": F.huber_loss, "mse": F.mse_loss, "mae": F.l1_loss}


class RegressionTask(ImageTask):
    """Task for models that predict one or more numbers per image.

    The network predicts normalized numbers, (number - mean) / std. mean, std: statistics of each
    number in the training set. loss: "huber", "mse" or "mae", computed from normalized numbers.
    The Huber loss is linear for normalized errors above 1.
    """

    metric = Metric("mae", higher_is_better=False, label="mean absolute error")
    output_formats = FORMATS

    def __init__(
        self,
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        loss: str = "huber",
        **common: Any,
    ):
        super().__init__(**common)
        self.criterion = LOSSES[loss]
        self.set_scale(mean, std)

    def set_scale(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the mean and the standard deviation with which each number is normalized."""
        place = dict(dtype=torch.float32, device=self.device)
        self.mean, self.std = torch.tensor(mean, **place), torch.tensor(std, **place)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss, and the mean absolute error as a metric.

        Both are means over images and numbers. The loss is computed from normalized numbers. The
        metric is in the original units of the numbers.
        """
        outputs = model(batch.images).float()
        scaled = (batch.targets - self.mean) / self.std
        losses = self.criterion(outputs, scaled, reduction="none").mean(-1)
        error = (self.denormalize(outputs.detach()) - batch.targets).abs().mean()
        return self.average_losses(losses, batch, {"mae": error})

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Convert the normalized numbers (B, K) that the network returns to the original units."""
        return outputs * self.std + self.mean

    def compute_outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the predicted numbers (B, K) float32, in the original units.

        images: (B, c, H, W), on the device.
        """
        return self.denormalize(super().compute_outputs(model, images))

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of the test set `name`, see `score`."""
        outputs = self.collect_outputs(model, name, between)
        return compute_on_main(lambda: self.score(outputs))

    def score(self, outputs: Outputs) -> dict[str, Any]:
        """Return the metrics of predicted numbers (N, K), a dict with these keys:

        loss        training loss of the normalized numbers
        mae, rmse   errors in the original units of the numbers, means over the K numbers
        r2          coefficient of determination, the mean over numbers that vary in the test set
        count       number of images
        per_number  {"mae": list, "rmse": list, "r2": list}, with one value per number. r2 is NaN
                    for a number that does not vary in the test set.
        """
        targets = outputs.targets.astype(np.float64)
        errors = outputs.values.astype(np.float64) - targets
        spread = ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 0, 1 - (errors**2).sum(axis=0) / spread, np.nan)
        each = {
            "mae": np.abs(errors).mean(axis=0),
            "rmse": np.sqrt((errors**2).mean(axis=0)),
            "r2": r2,
        }
        scaled = torch.from_numpy(errors / self.std.cpu().double().numpy())
        loss = self.criterion(scaled, torch.zeros_like(scaled))
        return {
            "loss": loss.item(),
            **{name: float(values.mean()) for name, values in each.items()},
            "r2": float(r2[spread > 0].mean()) if (spread > 0).any() else float("nan"),
            "count": len(errors),
            "per_number": {name: values.tolist() for name, values in each.items()},
        }

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return a line of text with the errors of each predicted number. The list is empty if the
        model predicts only one number per image.

        name: name of the test set. metrics: result of `measure`.
        """
        names, each = self.test_sets[name].classes, metrics["per_number"]
        if len(names) < 2:
            return []
        rows = zip(names, each["mae"], each["rmse"], each["r2"])
        return [f"  {label:20} mae {a:.4f} rmse {b:.4f} r2 {c:.4f}" for label, a, b, c in rows]

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Convert predicted numbers (B, K) to one prediction per image."""
        return [Prediction(meta.name, row) for meta, row in zip(metas, output.tolist())]

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Write the predicted numbers onto a copy of the image."""
        pairs = zip(self.class_names, prediction.numbers)
        return draw_lines(image, [f"{name} {number:.4g}" for name, number in pairs])

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, [], reason)
