"""The features of a teacher as the target of images: loss and similarity.

Shapes: B images of a batch, N images of a test set, D features; X Y rows and columns of the grid.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vil.data.batch import Batch
from vil.engine.loop import Loss
from vil.tasks.base import TaskReport
from vil.tasks.distillation import METRICS
from vil.tasks.distillation.teacher import TRAIN, Teacher
from vil.tasks.image.report import ReportTable, render_report
from vil.tasks.image.target import BatchColumns, TestSet, mean_loss
from vil.tasks.pretraining.target import FeatureTarget

COSINE, SMOOTH_L1 = 0.9, 0.1  # weights of the terms of dense features
Predicted = tuple[Tensor, Tensor]  # summaries (B, D) and dense features (B, X*Y, D)


class Similarity(NamedTuple):
    """The similarity of a student to its teacher, one row per image of a test set, in the order of
    the set: cosine similarities of summaries and, averaged over the grid, of dense features, and
    the loss."""

    indices: np.ndarray  # (N,) int64: index of the image in the test set
    summary: np.ndarray
    dense: np.ndarray
    loss: np.ndarray


class Features(FeatureTarget):
    """The features of a teacher.

    The loss is 1 - cosine similarity of the summaries, such as class tokens, plus 0.9 * (1 - cosine
    similarity) + 0.1 * smooth L1 of the dense features, averaged over the grid.
    Source: AM-RADIO, arXiv:2312.06709, section 3.

    grid: rows and columns of the student's grid; set when the network is built.
    """

    metrics = METRICS

    def __init__(self, num_outputs: int, *, teacher: Teacher, **common: Any):
        super().__init__(**common)
        self.teacher = teacher
        self.grid = (0, 0)

    def compare(self, predicted: Predicted, batch: Batch, dataset: str) -> tuple[Tensor, ...]:
        """Return the cosine similarities of summaries and of dense features, and the losses, (B,)
        each. dataset: name of the batch's dataset, see `Teacher.open`."""
        wanted = self.teacher.features(batch, self.grid, dataset)
        (summary, dense), (wanted_summary, wanted_dense) = (
            [x.float() for x in pair] for pair in (predicted, wanted)
        )
        summaries = F.cosine_similarity(summary, wanted_summary, dim=-1)
        cells = F.cosine_similarity(dense, wanted_dense, dim=-1).mean(-1)
        error = F.smooth_l1_loss(dense, wanted_dense, reduction="none").mean((1, 2))
        return summaries, cells, 1 - summaries + COSINE * (1 - cells) + SMOOTH_L1 * error

    def loss(self, outputs: Any, batch: Batch, image_weights: Tensor | None) -> Loss:
        summary, dense, losses = self.compare(outputs, batch, TRAIN)
        shown = {"summary": summary.detach().mean(), "dense": dense.detach().mean()}
        return mean_loss(losses, image_weights, {k: 100 * value for k, value in shown.items()})

    def evaluate_batch(self, name: str, outputs: Any, batch: Batch) -> BatchColumns:
        columns = (batch.indices, *self.compare(outputs, batch, name))
        return BatchColumns([column.cpu().numpy() for column in columns])

    def gather(self, merged: BatchColumns) -> Similarity:
        return Similarity(*merged.columns)

    def measure(self, name: str, results: Similarity) -> dict[str, Any]:
        """Return the metrics of a test set, a dict with these keys:

        summary     mean cosine similarity of the summaries in percent
        dense       that of the dense features
        similarity  mean of the two
        loss        training loss
        count       number of images
        """
        means = {
            name: float(getattr(results, name).astype(np.float64).mean())
            for name in ("summary", "dense", "loss")
        }
        summary, dense = 100 * means["summary"], 100 * means["dense"]
        return {
            "similarity": (summary + dense) / 2,
            "summary": summary,
            "dense": dense,
            "loss": means["loss"],
            "count": len(results.indices),
        }

    def report(
        self, results: Similarity, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        """Return cards with the similarities, and the least similar images."""
        metrics = self.measure(test_set.name, results)
        remark = f"on {test_set.name}, {metrics['count']:,} images"
        cards = [
            (METRICS[name][0].capitalize(), f"{metrics[name]:.2f}%", text)
            for name, text in (("similarity", checkpoint), ("summary", remark), ("dense", remark))
        ]
        order = np.argsort(results.summary + results.dense, kind="stable")

        def describe(i: int) -> list[str]:
            return [f"summary {results.summary[i]:.3f}", f"dense {results.dense[i]:.3f}"]

        rows = [(METRICS[n][0], f"{metrics[n]:.2f}") for n in ("summary", "dense")]
        table = ReportTable(f"Similarity on {test_set.name}", ("features", "percent"), rows)
        images = ("Images with the least similar features", results.indices, order, describe)
        return TaskReport(cards, [render_report(test_set.dataset, table, images, [])])
