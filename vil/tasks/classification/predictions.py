"""Predictions on a whole test set, image by image, and what stands out in them.

Letters: I images, C classes of the test set, K classes of the model.
"""

from typing import NamedTuple

import numpy as np

SHOWN = 12  # images of a kind


class Predictions(NamedTuple):
    """One entry per image that was evaluated, all (I,).

    indices: the image's number in the test set. targets: its class. predicted: the most probable
    class of the model. right: whether that is correct. five: whether one of its five best is.
    probability: of the predicted class. loss: minus the logarithm of that of the true class.
    judged: whether there is a loss.
    """

    indices: np.ndarray
    targets: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    five: np.ndarray
    probability: np.ndarray
    loss: np.ndarray
    judged: np.ndarray

    def metrics(self) -> dict[str, float]:
        """loss, top1 and top5 in percent, count: as evaluation gives them."""
        losses = self.loss[self.judged]
        return {
            "loss": float(losses.mean(dtype=np.float64)) if len(losses) else np.nan,
            "top1": 100 * float(self.right.mean()),
            "top5": 100 * float(self.five.mean()),
            "count": len(self.indices),
        }

    def per_class(self, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Correct predictions and images of each class of the test set, (C,) each."""
        count = np.bincount(self.targets, minlength=classes)
        return np.bincount(self.targets[self.right], minlength=classes), count

    def confusion(self, classes: int) -> np.ndarray:
        """(C, C): images of a class by their prediction. For few classes."""
        pairs = self.targets * classes + self.predicted
        return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """(true class, prediction, images) of the most frequent errors, for any number of
        classes: no matrix of all pairs.
        """
        wrong = np.stack([self.targets[~self.right], self.predicted[~self.right]], axis=1)
        pairs, counts = np.unique(wrong, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        return [(*map(int, pairs[n]), int(counts[n])) for n in order]

    def extremes(self, most: int = SHOWN) -> dict[str, np.ndarray]:
        """Positions in the arrays of what to look at; no image twice."""
        wrong, right = np.flatnonzero(~self.right), np.flatnonzero(self.right)
        sure = wrong[np.argsort(-self.probability[wrong], kind="stable")[:most]]
        others = np.setdiff1d(np.flatnonzero(self.judged), sure)
        costly = others[np.argsort(-self.loss[others], kind="stable")[:most]]
        right = np.setdiff1d(right, costly)
        best = right[np.argsort(self.loss[right], kind="stable")[:most]]
        return {
            "Most confidently wrong": sure,
            "Highest loss of the others": costly,
            "Most confidently right": best,
        }
