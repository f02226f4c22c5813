"""The pixels of masked squares as the target of images: masks, loss and error.

Shapes: B images of a batch, N images of a test set, c channels, H W size of the images in pixels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from vil.data.batch import Batch
from vil.engine.loop import Loss
from vil.tasks.base import TaskReport
from vil.tasks.image.report import ReportTable, render_report
from vil.tasks.image.target import BatchColumns, TestSet, mean_loss
from vil.tasks.pretraining.target import FeatureTarget
from vil.tasks.simmim import METRICS
from vil.utils.memory import copy_to_device

BLANK = 1e-6  # errors of the mean color up to this are rounding errors


class Errors(NamedTuple):
    """The mean absolute error of the masked pixels of N images of a test set, in the order of the
    set, and that of the mean color of the visible pixels. The unit is INPUT.STD."""

    indices: np.ndarray  # (N,) int64: index of the image in the test set
    error: np.ndarray
    baseline: np.ndarray


class MaskedPixels(FeatureTarget):
    """The pixels of masked squares. The loss is their mean absolute error (SimMIM, section 3).

    Masked pixels have the mean color, INPUT.MEAN, where SimMIM has a learned token, so that any
    network can be trained. The mask of an image depends only on (seed, epoch, index of the image),
    and in evaluation on the index.

    ratio: share of the squares that are masked. patch: their side in pixels.
    """

    metrics = METRICS

    def __init__(self, num_outputs: int, *, seed: int, ratio: float, patch: int, **common: Any):
        super().__init__(**common)
        self.seed, self.ratio, self.patch = seed, ratio, patch

    def prepare(self, batch: Batch) -> Batch:
        return self._mask(batch, self.seed, batch.epoch)

    def prepare_test(self, batch: Batch) -> Batch:
        return self._mask(batch)

    def _mask(self, batch: Batch, *key: int) -> Batch:
        """Mask the images (B, c, H, W). The targets (B, c+1, H, W) are the images and their masks,
        which are 1 for masked pixels. key: selects the masks, with the index of the image."""
        images = cast(Tensor, batch.images)
        height, width = images.shape[2:]
        rows, columns = height // self.patch, width // self.patch
        count = rows * columns
        masked = min(max(round(self.ratio * count), 1), count - 1)
        masks = np.zeros((len(images), count), np.float32)
        for mask, index in zip(masks, batch.indices.tolist()):
            mask[np.random.default_rng([*key, index]).permutation(count)[:masked]] = 1
        squares = copy_to_device(torch.from_numpy(masks), self.device).view(-1, 1, rows, columns)
        mask = squares.repeat_interleave(self.patch, 2).repeat_interleave(self.patch, 3)
        targets = torch.cat([images, mask], 1)
        return replace(batch, images=images * (1 - mask), targets=targets)

    def compare(self, predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors (B,) of predicted images (B, c, H, W), and those of the mean colors."""
        images, mask = targets[:, :-1], targets[:, -1:]
        visible = 1 - mask
        color = (images * visible).sum((2, 3), keepdim=True) / visible.sum((2, 3), keepdim=True)
        count = images.shape[1] * mask.sum((1, 2, 3))
        error, baseline = (
            ((x - images).abs() * mask).sum((1, 2, 3)) / count for x in (predicted.float(), color)
        )
        return error, baseline

    def loss(self, outputs: Tensor, batch: Batch, image_weights: Tensor | None) -> Loss:
        error, _ = self.compare(outputs, batch.targets)
        return mean_loss(error, image_weights, {})

    def evaluate_batch(self, name: str, outputs: Tensor, batch: Batch) -> BatchColumns:
        columns = (batch.indices, *self.compare(outputs, batch.targets))
        return BatchColumns([column.cpu().numpy() for column in columns])

    def gather(self, merged: BatchColumns) -> Errors:
        return Errors(*merged.columns)

    def measure(self, name: str, results: Errors) -> dict[str, Any]:
        """Return the metrics of a test set, a dict with these keys:

        skill     by how many percent `loss` is below `baseline`; 0 for blank images
        loss      mean absolute error of the masked pixels, in the unit INPUT.STD
        baseline  that of the mean color of an image's visible pixels
        count     number of images
        """
        error, baseline = (float(x.astype(np.float64).mean()) for x in results[1:])
        skill = 100 * (1 - error / baseline) if baseline > BLANK else 0.0
        return {
            "skill": skill,
            "loss": error,
            "baseline": baseline,
            "count": len(results.indices),
        }

    def report(
        self, results: Errors, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        """Return cards with the error, and the images with the largest errors."""
        found = self.measure(test_set.name, results)
        remark = f"on {test_set.name}, {found['count']:,} images"
        skill, error = (METRICS[name][0].capitalize() for name in METRICS)
        cards = [
            (skill, f"{found['skill']:.2f}%", checkpoint),
            (error, f"{found['loss']:.4f}", remark),
        ]

        def describe(i: int) -> list[str]:
            return [f"error {results.error[i]:.3f}", f"of the mean color {results.baseline[i]:.3f}"]

        rows = [(METRICS["loss"][0], f"{found['loss']:.4f}")]
        rows.append(("that of the mean color", f"{found['baseline']:.4f}"))
        table = ReportTable(f"Errors on {test_set.name}", ("", "INPUT.STD"), rows)
        order = np.argsort(-results.error, kind="stable")
        images = ("Images with the largest errors", results.indices, order, describe)
        return TaskReport(cards, [render_report(test_set.dataset, table, images, [])])
