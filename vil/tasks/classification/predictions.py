"""Per-image predictions on a test set, for metrics and for the run report.

Shapes: N images, K classes of the model, C classes of the test set.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Predictions(NamedTuple):
    """Predictions for N images and their losses, as arrays (N,), in the order of the test set."""

    indices: np.ndarray  # index of the image in the test set
    targets: np.ndarray  # class of the image
    predicted: np.ndarray  # the model's most probable class
    correct: np.ndarray  # bool: whether the top-1 prediction is correct
    top5: np.ndarray  # bool: whether one of the top-5 predictions is correct
    probability: np.ndarray  # probability of the predicted class
    loss: np.ndarray  # cross entropy
    has_loss: np.ndarray  # bool, see `score_by_mapping`
    probabilities: np.ndarray | None = None  # (N, K); None above `MAX_RANKED` classes
    loss_sum: float | None = None  # of all losses, added batch by batch

    def mean_loss(self) -> float:
        """Return the mean cross entropy of the images that have a loss; NaN if no image has one."""
        losses = self.loss[self.has_loss]
        total = losses.sum(dtype=np.float64) if self.loss_sum is None else self.loss_sum
        return float(total) / len(losses) if len(losses) else float("nan")

    def per_class(self, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Count the correct predictions and the images of each class, and return two arrays (C,).

        num_classes: number C of classes of the test set.
        """
        targets = self.targets, self.targets[self.correct]
        count, correct = (np.bincount(x, minlength=num_classes) for x in targets)
        return correct, count

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """Return the most frequent confusions of two classes, most frequent first.

        Each item is (true class, predicted class, number of images). most: maximum number of items.
        """
        wrong = np.stack([self.targets[~self.correct], self.predicted[~self.correct]], axis=1)
        pairs, counts = np.unique(wrong, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        return [(*map(int, pairs[n]), int(counts[n])) for n in order]

    def extremes(self, most: int) -> dict[str, np.ndarray]:
        """Select images for the report, in three groups of at most `most` images.

        The groups are the most confident wrong predictions, the highest losses of the other images,
        and the most confident correct predictions. No image is in two groups. Returns {title of the
        group: indices into the arrays of this object}.
        """

        def first(candidates: np.ndarray, key: np.ndarray) -> np.ndarray:
            return candidates[np.argsort(key[candidates], kind="stable")[:most]]

        confident = first(np.flatnonzero(~self.correct), -self.probability)
        costly = first(np.setdiff1d(np.flatnonzero(self.has_loss), confident), -self.loss)
        correct = first(np.setdiff1d(np.flatnonzero(self.correct), costly), self.loss)
        return {
            "Most confidently wrong": confident,
            "Highest loss of the others": costly,
            "Most confidently correct": correct,
        }


class BatchPredictions(NamedTuple):
    """The predictions for a batch.

    columns: list of arrays, the fields of `Predictions` from `indices` to `probabilities`.
    loss_sum: the sum of the losses of the batch's images.
    """

    columns: list[np.ndarray | None]
    loss_sum: float


def merge(batches: Iterable[BatchPredictions]) -> Predictions:
    """Merge the predictions of batches, and sort them by the images' indices in the test set.

    The result, including the rounding of the sum of losses, does not depend on the order of
    `batches`.
    """
    ordered = sorted(batches, key=lambda batch: batch.columns[0][0])  # by the first image
    columns = [
        None if parts[0] is None else np.concatenate(parts)
        for parts in zip(*(batch.columns for batch in ordered))
    ]
    total = 0.0
    for batch in ordered:
        total += batch.loss_sum
    order = np.argsort(columns[0], kind="stable")
    return Predictions(*(c if c is None else c[order] for c in columns), loss_sum=total)
