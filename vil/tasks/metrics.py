"""Metrics of predictions on a test set, as functions of numpy arrays, for all tasks.

The definitions are those of scikit-learn, which is too slow for a bootstrap with a thousand
resamples of the same images. Here, images are sorted only once per class.

Shapes: N images, K classes, G distinct scores. weights (N,): number of times that each image is
counted in a bootstrap resample; None: once. Metrics are in percent, and NaN for a class without
images. The AUROC is also NaN for a class to which all images belong. `mean` ignores NaN.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

NUM_BINS = 15  # of the expected calibration error
RESAMPLES, MIN_RESAMPLES = 1000, 100
MAX_WORK = 10**8  # values that all resamples of a bootstrap may read
COVERAGE = 95  # percent


def mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else float("nan")


class ClassCounts(NamedTuple):
    """Numbers of images of each class, as arrays (K,), for precision and recall.

    images: images that belong to the class. predicted: images for which the class is predicted.
    correct: images that belong to the class and for which this class is predicted.
    """

    images: np.ndarray
    predicted: np.ndarray
    correct: np.ndarray

    def precision(self) -> np.ndarray:
        """Return the precision of each class, (K,): the percentage of its predictions that are
        correct.

        It is NaN for a class without images, and 0 for any other class that is never predicted.
        """
        return self._share(self.correct, self.predicted)

    def recall(self) -> np.ndarray:
        """Return the recall of each class, (K,): the percentage of its images that are predicted
        correctly.

        It is NaN for a class without images.
        """
        return self._share(self.correct, self.images)

    def f1(self) -> np.ndarray:
        """Return the F1 of each class in percent, (K,).

        It is the harmonic mean of precision and recall, and NaN for a class without images.
        """
        return self._share(2 * self.correct, self.images + self.predicted)

    def _share(self, part: np.ndarray, total: np.ndarray) -> np.ndarray:
        return np.where(self.images > 0, 100 * part / np.maximum(total, 1), np.nan)


def count_classes(
    targets: np.ndarray,
    predicted: np.ndarray,
    num_classes: int,
    weights: np.ndarray | None = None,
) -> ClassCounts:
    """Count the images, the predictions and the correct predictions of each class.

    targets: ground-truth classes (N,). predicted: predicted classes (N,). weights (N,): number of
    times that each image is counted; None: once.
    """
    hits = (targets == predicted).astype(np.int64)
    right = hits if weights is None else hits * weights
    columns = (targets, weights), (predicted, weights), (targets, right)
    return ClassCounts(*(np.bincount(x, w, minlength=num_classes) for x, w in columns))


def confusion_matrix(targets: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the confusion matrix (K, K): image counts by [true class, predicted class]."""
    pairs = targets * num_classes + predicted
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


class Ranking(NamedTuple):
    """Images sorted by descending score, for binary metrics such as AUROC."""

    order: np.ndarray  # (N,) index of the image at each rank
    positive: np.ndarray  # (N,) bool, at each rank: whether the image is positive
    ends: np.ndarray  # (G,) rank of the last image with each distinct score


def rank(scores: np.ndarray, positive: np.ndarray) -> Ranking | None:
    """Sort images by descending score. Returns None if a score is NaN.

    scores (N,): the predicted score of each image. positive (N,) bool: whether each image belongs
    to the positive class.
    """
    if np.isnan(scores).any():
        return None
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    return Ranking(order, positive[order], ends)


def rank_metrics(ranking: Ranking | None, weights: np.ndarray | None = None) -> tuple[float, float]:
    """Return (area under the ROC curve, average precision) of a ranking, in percent.

    Images with equal scores are one point of the curves, so their order does not matter. ranking:
    result of `rank`. weights (N,): number of times that each image is counted; None: once.
    """
    if ranking is None:
        return float("nan"), float("nan")
    order, positive, ends = ranking
    weights = np.ones(len(order), np.int64) if weights is None else weights[order]
    true = np.cumsum(weights * positive)[ends]
    false = np.cumsum(weights)[ends] - true
    positives, negatives = int(true[-1]), int(false[-1])
    if not positives:
        return float("nan"), float("nan")
    steps = np.diff(true, prepend=0)
    precision = true / np.maximum(true + false, 1)
    average_precision = 100 * float((steps * precision).sum()) / positives
    if not negatives:
        return float("nan"), average_precision
    twice_area = int((np.diff(false, prepend=0) * (2 * true - steps)).sum())
    return 100 * twice_area / (2 * positives * negatives), average_precision


class CalibrationBins(NamedTuple):
    """Sums over the images in each bin of a reliability diagram, as arrays (NUM_BINS,).

    images: number of images. confidence: sum of the probabilities of the predicted classes.
    correct: number of correct predictions.
    """

    images: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray

    def expected_error(self) -> float:
        """Return the expected calibration error in percent (arXiv:1706.04599, equation 3).

        This is the mean over images of |accuracy - mean confidence| in the bin of the image.
        """
        return 100 * float(np.abs(self.correct - self.confidence).sum() / self.images.sum())


def calibration_bins(
    confidence: np.ndarray, correct: np.ndarray, weights: np.ndarray | None = None
) -> CalibrationBins | None:
    """Sort images into bins of equal width by confidence. Returns None if a confidence is NaN.

    confidence (N,): probability of the predicted class. correct (N,) bool: whether this class is
    correct. weights (N,): how often each image is counted. A bin contains its upper edge but not
    its lower edge.
    """
    if np.isnan(confidence).any():
        return None
    confidence = confidence.astype(np.float64)
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    weights = np.ones(len(bins)) if weights is None else weights
    columns = weights, weights * confidence, weights * correct
    return CalibrationBins(*(np.bincount(bins, w, minlength=NUM_BINS) for w in columns))


def bootstrap(
    statistic: Callable[[np.ndarray], Mapping[str, float]],
    num_images: int,
    *,
    num_values: int | None = None,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Estimate 95 % intervals of metrics by a bootstrap over images: {metric: (low, high)}.

    The interval of a metric is from its 2.5th to its 97.5th percentile over the resamples in which
    it is not NaN. A metric that is always NaN is left out. There are RESAMPLES resamples, or fewer
    if `num_values` is large. Returns {} if there would be fewer than MIN_RESAMPLES.

    Args:
        statistic: function that returns {metric: value}. Its argument (num_images,) int64 is the
            number of times that each image is in the resample.
        num_values: number of values that a call of `statistic` reads, by default num_images. All
            calls together read at most MAX_WORK values, to limit the running time.
    """
    resamples = min(RESAMPLES, MAX_WORK // max(num_values or num_images, 1))
    if resamples < MIN_RESAMPLES:
        return {}
    generator = np.random.default_rng(seed)
    draws = (generator.integers(num_images, size=num_images) for _ in range(resamples))
    rows = [statistic(np.bincount(draw, minlength=num_images)) for draw in draws]
    tail = (100 - COVERAGE) / 2
    intervals = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        valid = values[~np.isnan(values)]
        if valid.size:
            intervals[name] = tuple(map(float, np.percentile(valid, [tail, 100 - tail])))
    return intervals
