"""Numbers as targets: regression of one or more numbers per image.

Shapes: B images of a batch, N images of a test set, K numbers per image. The network predicts
normalized numbers, with mean 0 and standard deviation 1 in the training set. Numbers are normalized
and restored in float64, because float32 cannot tell apart large numbers that differ little.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.engine.loop import Loss
from vil.models.head_names import find_heads
from vil.tasks.base import TaskReport
from vil.tasks.image import NUMBER_METRICS
from vil.tasks.image.predictions import NumberPrediction, as_csv, as_json, as_table
from vil.tasks.image.report import ReportTable, plot_predictions, render_report
from vil.tasks.image.target import Outputs, Target, TestSet, mean_loss
from vil.utils.errors import DataError

LOSSES = {"huber": F.huber_loss, "mse": F.mse_loss, "mae": F.l1_loss}


class Affine(nn.Module):
    """Maps numbers (B, K) to factor * numbers + offset. factor, offset: (K,)."""

    factor: Tensor
    offset: Tensor

    def __init__(self, factor: Tensor, offset: Tensor):
        super().__init__()
        self.register_buffer("factor", factor.float())
        self.register_buffer("offset", offset.float())

    def forward(self, numbers: Tensor) -> Tensor:
        return self.factor * numbers.float() + self.offset


class Numbers(Target):
    """One or more numbers per image.

    The network predicts normalized numbers, (number - mean) / std.

    Args:
        num_numbers: number K of numbers per image.
        mean, std: statistics of each number in the training set. If they are empty, `read_targets`
            computes them; until then, they are 0 and 1.
        loss: "huber", "mse" or "mae", computed from normalized numbers. The Huber loss is linear
            for normalized errors above 1.
    """

    target_type = "numbers"
    metrics = NUMBER_METRICS
    prediction = NumberPrediction
    output_name, activation = "numbers", "none"
    formats = {"table": as_table, "json": as_json, "csv": as_csv}

    def __init__(
        self,
        num_numbers: int,
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        loss: str = "huber",
        **common: Any,
    ):
        super().__init__(**common)
        self.criterion = LOSSES[loss]
        self.given_scale = list(mean), list(std)
        self.set_scale(mean or [0.0] * num_numbers, std or [1.0] * num_numbers)

    def set_scale(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the mean and the standard deviation with which each number is normalized."""
        # MPS has no float64
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        place = dict(dtype=dtype, device=self.device)
        self.mean, self.std = torch.tensor(mean, **place), torch.tensor(std, **place)

    def read_targets(self, dataset: ImageDataset) -> dict[str, Any]:
        """Set the mean and the standard deviation with which targets are normalized.

        Those that were not given are computed from the training set. Raises DataError if a number
        whose standard deviation is computed is the same for all images.
        """
        targets = dataset.targets.astype(np.float64)
        mean = self.given_scale[0] or targets.mean(axis=0).tolist()
        # rounding may give the deviation of equal numbers a value above 0
        computed = np.where(np.ptp(targets, axis=0) > 0, targets.std(axis=0), 0.0)
        std = self.given_scale[1] or computed.tolist()
        constant = [name for name, value in zip(dataset.classes, std) if value == 0]
        if constant:
            raise DataError(
                f"{len(constant)} of {len(std)} targets (such as {constant[0]}) are constant in "
                "the training set and cannot be learned: remove them"
            )
        self.set_scale(mean, std)
        return {"REGRESSION.MEAN": mean, "REGRESSION.STD": std}

    def loss(self, outputs: Tensor, batch: Batch, image_weights: Tensor | None) -> Loss:
        """Compute the training loss, and the mean absolute error as a metric.

        Both are means over images and numbers. The loss is computed from normalized numbers. The
        metric is in the original units of the numbers.
        """
        outputs = outputs.float()
        scaled = ((batch.targets - self.mean) / self.std).float()
        losses = self.criterion(outputs, scaled, reduction="none").mean(-1)
        error = (self.decode(outputs.detach()) - batch.targets).abs().mean()
        return mean_loss(losses, image_weights, {"mae": error.float()})

    def decode(self, outputs: Tensor) -> Tensor:
        """Convert the normalized numbers (B, K) that the network returns to the original units."""
        return outputs * self.std + self.mean

    def measure(self, name: str, results: Outputs) -> dict[str, Any]:
        """Return the metrics of predicted numbers (N, K), a dict with these keys:

        loss        training loss of the normalized numbers
        mae, rmse   errors in the original units of the numbers, means over the K numbers
        r2          coefficient of determination, the mean over numbers that vary in the test set
        count       number of images
        per_number  {"mae": list, "rmse": list, "r2": list}, with one value per number. r2 is NaN
                    for a number that does not vary in the test set.
        """
        targets = results.targets.astype(np.float64)
        errors = results.values.astype(np.float64) - targets
        spread = ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
        spread = np.where(np.ptp(targets, axis=0) > 0, spread, 0.0)
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

    def format_metrics(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return a line of text with the errors of each predicted number. The list is empty if the
        model predicts only one number per image."""
        if len(classes) < 2:
            return []
        each = metrics["per_number"]
        rows = zip(classes, each["mae"], each["rmse"], each["r2"])
        return [f"  {label:20} mae {a:.4g} rmse {b:.4g} r2 {c:.4f}" for label, a, b, c in rows]

    def report(
        self, results: Outputs, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        """Return cards, a table of errors, plots, and the images with the largest errors.

        Errors are compared after division by the standard deviation of the number in the training
        set.
        """
        metrics = self.measure(test_set.name, results)
        remark = f"on {test_set.name}, {metrics['count']:,} images"
        cards = [
            ("Mean absolute error", f"{metrics['mae']:.4g}", checkpoint),
            ("Root mean squared error", f"{metrics['rmse']:.4g}", remark),
            ("R2", f"{metrics['r2']:.4f}", remark),
        ]
        each = metrics["per_number"]
        rows = [
            (name, f"{mae:.4g}", f"{rmse:.4g}", f"{r2:.4f}")
            for name, mae, rmse, r2 in zip(class_names, each["mae"], each["rmse"], each["r2"])
        ]
        columns = ("number", "mean absolute error", "root mean squared error", "R2")
        errors = np.abs(results.values - results.targets) / self.std.cpu().numpy()
        worst = np.argsort(-errors.mean(axis=1), kind="stable")

        def describe(i: int) -> list[str]:
            rows = zip(class_names, results.targets[i], results.values[i])
            return [f"{name}: true {t:.4g}, predicted {p:.4g}" for name, t, p in rows]

        table = ReportTable(f"Errors of each number on {test_set.name}", columns, rows)
        images = ("Images with the largest errors", results.indices, worst, describe)
        plots = [("Predicted and true numbers", plot_predictions(results, class_names))]
        return TaskReport(cards, [render_report(test_set.dataset, table, images, plots)])

    def predict(
        self, values: Tensor, files: Sequence[str], label: Callable[[int], str]
    ) -> list[NumberPrediction]:
        """Convert predicted numbers (B, K) to one prediction per image."""
        rows = zip(files, values.tolist())
        return [NumberPrediction(file, numbers=numbers) for file, numbers in rows]

    def for_export(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model that predicts the numbers in their original units, (B, K)
        float64."""
        model = deepcopy(model)
        model.register_forward_hook(lambda module, args, outputs: self.decode(outputs.double()))
        return model

    def renormalize(
        self, network: nn.Module, mean: Sequence[float], std: Sequence[float]
    ) -> nn.Module:
        """Let a network of another run predict numbers that are normalized as those of this one.

        mean, std: with which the network's own numbers are normalized.
        """
        place = dict(dtype=self.mean.dtype, device=self.mean.device)
        other_mean, other_std = torch.tensor(mean, **place), torch.tensor(std, **place)
        return nn.Sequential(
            network, Affine(other_std / self.std, (other_mean - self.mean) / self.std)
        )

    def rescale_head(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        """Let the head predict numbers that are normalized as those of this task. A head without a
        bias is not changed. mean, std: with which its own numbers are normalized."""
        place = dict(dtype=self.mean.dtype, device=self.mean.device)
        other_mean, other_std = torch.tensor(mean, **place), torch.tensor(std, **place)
        if torch.equal(other_mean, self.mean) and torch.equal(other_std, self.std):
            return
        factor, offset = other_std / self.std, (other_mean - self.mean) / self.std
        for head in find_heads(model):
            if isinstance(head, nn.Linear) and head.bias is not None:
                with torch.no_grad():
                    head.weight.copy_(factor[:, None] * head.weight)
                    head.bias.copy_(factor * head.bias + offset)

    def encode(self, outputs: Tensor) -> Tensor:
        return ((outputs - self.mean) / self.std).float()

    def describe(self, prediction: NumberPrediction, label: Callable[[int], str]) -> list[str]:
        return [f"{label(i)} {number:.4g}" for i, number in enumerate(prediction.numbers)]
