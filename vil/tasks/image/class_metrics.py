"""Metrics of a classifier's predictions on a test set, and their bootstrap intervals.

Shapes: N images, K classes of the model, C classes of the test set. weights (N,): number of times
that each image is counted in a bootstrap resample; None: count each image once.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from vil.tasks.metrics import bootstrap, calibration_bins, count_classes, mean, rank, rank_metrics

MAX_RANKED = 100  # maximum number of classes for which all probabilities are kept, for AUROC and AP


class Predictions(NamedTuple):
    """Predictions for N images and their losses, as arrays (N,), in the order of the test set."""

    indices: np.ndarray  # index of the image in the test set
    targets: np.ndarray  # class of the image
    predicted: np.ndarray  # the model's most probable class
    correct: np.ndarray  # bool: whether the top-1 prediction is correct
    top5: np.ndarray  # bool: whether one of the top-5 predictions is correct
    probability: np.ndarray  # probability of the predicted class
    loss: np.ndarray  # cross entropy
    has_loss: np.ndarray  # bool, see `score`
    probabilities: np.ndarray | None = None  # (N, K); None above `MAX_RANKED` classes
    loss_sum: float | None = None  # of all losses, added batch by batch

    def mean_loss(self) -> float:
        """Return the mean cross entropy of the images that have a loss; NaN if no image has one."""
        losses = self.loss[self.has_loss]
        total = losses.sum(dtype=np.float64) if self.loss_sum is None else self.loss_sum
        return float(total) / len(losses) if len(losses) else float("nan")

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


def metric_names(num_classes: int, *, is_mapped: bool = False) -> list[str]:
    """Return the names of the metrics of a classifier with `num_classes` classes.

    is_mapped: whether the test set has other classes than the model, so that DATA.TARGETMAP maps
    the predictions to the test set's classes. If so, only loss, top-k accuracy and count remain.
    """
    names = ["loss", "top1", *(["top5"] if num_classes > 5 else [])]
    if is_mapped:
        return [*names, "count"]
    names += ["balanced_accuracy", "macro_precision", "macro_recall", "macro_f1"]
    names += ["auroc", "average_precision"] if num_classes <= MAX_RANKED else []
    return [*names, "ece", "count"]


class ClassificationMetrics:
    """The metrics of a classifier's predictions on a test set.

    num_classes: number of classes of the model. is_mapped: whether the test set has other classes
    than the model. If so, metrics that require a test set with the model's classes, such as F1,
    are omitted.
    """

    def __init__(self, predictions: Predictions, num_classes: int, *, is_mapped: bool = False):
        self.predictions, self.num_classes, self.is_mapped = predictions, num_classes, is_mapped
        self.rankings = []
        if not is_mapped and (scores := predictions.probabilities) is not None:
            is_class = predictions.targets[:, None] == np.arange(num_classes)
            self.rankings = [rank(scores[:, k], is_class[:, k]) for k in range(num_classes)]

    def averages(self) -> dict[str, Any]:
        """Return the metrics of the test set as {name: value}, in the order of `metric_names`."""
        values = {**self.image_metrics(), **self.rank_metrics()}
        values |= {"loss": self.predictions.mean_loss(), "count": len(self.predictions.indices)}
        names = metric_names(self.num_classes, is_mapped=self.is_mapped)
        return {name: values[name] for name in names if name in values}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return a bootstrap's 95 % interval of each metric: {name of the metric: (low, high)}."""
        count = len(self.predictions.indices)
        intervals = bootstrap(self.image_metrics, count)
        if self.rankings:
            values = count * self.num_classes
            intervals |= bootstrap(self.rank_metrics, count, num_values=values)
        return {name: intervals[name] for name in self.averages() if name in intervals}

    def image_metrics(self, weights: np.ndarray | None = None) -> dict[str, float]:
        """Return {name: value} of the metrics that do not rank images, such as top-1 accuracy.

        weights (N,): number of times that each image is counted; None: once. If a probability is
        NaN, all values are NaN.
        """
        p = self.predictions
        weights = np.ones(len(p.indices), np.int64) if weights is None else weights
        images, with_loss = int(weights.sum()), weights * p.has_loss
        values = {
            "loss": float((with_loss * p.loss).sum() / max(with_loss.sum(), 1)),
            "top1": 100 * int(weights[p.correct].sum()) / images,
            "top5": 100 * int(weights[p.top5].sum()) / images,
        }
        if not self.is_mapped:
            counts = count_classes(p.targets, p.predicted, self.num_classes, weights)
            bins = calibration_bins(p.probability, p.correct, weights)
            recall = mean(counts.recall())
            values |= {
                "balanced_accuracy": recall,
                "macro_precision": mean(counts.precision()),
                "macro_recall": recall,
                "macro_f1": mean(counts.f1()),
                "ece": float("nan") if bins is None else bins.expected_error(),
            }
        return dict.fromkeys(values, math.nan) if np.isnan(p.probability).any() else values

    def rank_metrics(self, weights: np.ndarray | None = None) -> dict[str, float]:
        """Return AUROC and average precision, as means over classes: {name: value}.

        Returns {} if the predictions have only the probability of the predicted class. weights
        (N,): number of times that each image is counted; None: once.
        """
        if not self.rankings:
            return {}
        auroc, precision = np.array([rank_metrics(r, weights) for r in self.rankings]).T
        return {"auroc": mean(auroc), "average_precision": mean(precision)}

    def per_class(self, num_classes: int) -> dict[str, list]:
        """Return the metrics of each class: {name of the metric: list with one value per class}.

        "right" and "count" are the numbers of correct predictions and of images. If the test set
        has the model's classes, "precision", "recall" and "f1" are added. If, in addition, the
        predictions have the probabilities of all classes, "auroc" and "average_precision" are
        added.
        """
        p = self.predictions
        targets = {"right": p.targets[p.correct], "count": p.targets}
        table = {name: np.bincount(x, minlength=num_classes) for name, x in targets.items()}
        if not self.is_mapped:
            counts = count_classes(p.targets, p.predicted, num_classes)
            table |= {name: getattr(counts, name)() for name in ("precision", "recall", "f1")}
            if self.rankings:
                ranked = np.array([rank_metrics(ranking) for ranking in self.rankings]).T
                table |= dict(zip(("auroc", "average_precision"), ranked))
        return {name: np.asarray(column).tolist() for name, column in table.items()}
