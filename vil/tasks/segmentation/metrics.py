"""Metrics of segmentation, from integer counts of pixels.

The counts of several images, or of the images of several ranks, are added. So the metrics are the
same for any batch size and any number of processes.

Shapes: K classes, H, W height and width of an image. Metrics are in percent. A metric is NaN for a
class that does not occur, and means over classes leave out NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vil.tasks.metrics import ClassCounts, mean
from vil.tasks.segmentation import IGNORE


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of labeled pixels, those whose true class is not IGNORE, which can be added.

    confusion (K, K) int64: number of pixels by [true class, predicted class].
    boundary (4, K) int64: for each class, the number of boundary pixels of the truth and of the
    prediction, then how many of them match, see `count`.
    """

    confusion: np.ndarray
    boundary: np.ndarray

    @classmethod
    def zeros(cls, num_classes: int) -> "Counts":
        shapes = (num_classes, num_classes), (4, num_classes)
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.confusion + other.confusion, self.boundary + other.boundary)

    def class_counts(self) -> ClassCounts:
        """Return the numbers of true, predicted and correctly predicted pixels of each class."""
        return ClassCounts(self.confusion.sum(1), self.confusion.sum(0), self.confusion.diagonal())

    def iou(self) -> np.ndarray:
        """Return the intersection over union of each class, (K,): the number of correctly predicted
        pixels, divided by the number of pixels that are of the class or predicted to be.

        It is NaN for a class that is neither.
        """
        pixels, predicted, correct = self.class_counts()
        union = pixels + predicted - correct
        return np.where(union > 0, 100 * correct / np.maximum(union, 1), np.nan)

    def boundary_f1(self) -> np.ndarray:
        """Return the boundary F1 of each class, (K,): the harmonic mean of the shares of the
        boundary pixels of the prediction and of the truth that match.

        It is NaN for a class without boundary, and 0 for a class that has a boundary only in the
        truth or only in the prediction. Source: Csurka et al., "What is a good evaluation measure
        for semantic segmentation?", BMVC 2013, who compute it for each image, and average over
        images. Here, the counts are added over images first, so that each boundary pixel counts
        the same.
        """
        truth, predicted, truth_matched, predicted_matched = self.boundary
        precision = predicted_matched / np.maximum(predicted, 1)
        recall = truth_matched / np.maximum(truth, 1)
        total = precision + recall
        f1 = 2 * precision * recall / np.where(total > 0, total, 1)
        return np.where(truth + predicted > 0, 100 * f1, np.nan)


def count(
    target: Tensor | np.ndarray,
    predicted: Tensor | np.ndarray,
    num_classes: int,
    boundary_tolerance: int,
) -> Counts:
    """Count the pixels of an image.

    target (H, W): true class numbers or IGNORE. predicted (H, W): predicted class numbers. Pixels
    with the true class IGNORE are not counted, whatever is predicted there.

    A boundary pixel of a map of classes is a labeled pixel next to a labeled pixel of another class
    (left, right, above or below). It matches if the other map has a boundary pixel of the same
    class at a Euclidean distance of at most boundary_tolerance pixels.
    """
    truth, answer = _as_classes(target), _as_classes(predicted)
    assert truth.shape == answer.shape, (truth.shape, answer.shape)
    labeled = truth != IGNORE
    true_classes, predicted_classes = truth[labeled], answer[labeled]
    for classes in (true_classes, predicted_classes):
        assert not classes.size or 0 <= classes.min() <= classes.max() < num_classes, num_classes
    pairs = true_classes.astype(np.intp) * num_classes + predicted_classes
    confusion = np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)

    edges = [_keep_boundary(truth), _keep_boundary(np.where(labeled, answer, IGNORE))]
    # The values at non-boundary pixels, which are IGNORE = -1, are counted in front of class 0.
    totals = [np.bincount(edge.ravel() + 1, minlength=num_classes + 1)[1:] for edge in edges]
    matches = [
        _count_matches(*pair, num_classes, boundary_tolerance) for pair in (edges, edges[::-1])
    ]
    return Counts(confusion.astype(np.int64), np.array([*totals, *matches], np.int64))


def values(counts: Counts) -> dict[str, float]:
    """Return the metrics of `vil.tasks.segmentation.METRICS`, {name: value}.

    miou and mean_accuracy are means over classes. fw_iou is the mean IoU, weighted by the number of
    pixels of each class (arXiv:1411.4038, section 5). All are NaN without labeled pixels.
    """
    pixels, _, correct = classes = counts.class_counts()
    iou, total = counts.iou(), pixels.sum()
    present = pixels > 0
    return {
        "miou": mean(iou),
        "pixel_accuracy": float(100 * correct.sum() / total) if total else float("nan"),
        "mean_accuracy": mean(classes.recall()),
        "fw_iou": float(pixels[present] @ iou[present] / total) if total else float("nan"),
        "boundary_f1": mean(counts.boundary_f1()),
    }


def per_class(counts: Counts, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of each class, {name of the metric: {name of the class: value}}.

    accuracy and precision are the shares of the true and of the predicted pixels of a class that
    are correct, see `ClassCounts`. Both are NaN for a class without true pixels. names (K,): of the
    classes.
    """
    classes = counts.class_counts()
    columns = {
        "iou": counts.iou(),
        "accuracy": classes.recall(),
        "precision": classes.precision(),
        "boundary_f1": counts.boundary_f1(),
    }
    return {metric: dict(zip(names, column.tolist())) for metric, column in columns.items()}


def _as_classes(classes: Tensor | np.ndarray) -> np.ndarray:
    array = classes.cpu().numpy() if isinstance(classes, Tensor) else classes
    return array.astype(np.int16)


def _keep_boundary(classes: np.ndarray) -> np.ndarray:
    """Replace the classes of all pixels that are not boundary pixels, see `count`, by IGNORE."""
    is_boundary = np.zeros(classes.shape, bool)
    for first, second in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        a, b = classes[first], classes[second]
        differ = (a != b) & (a != IGNORE) & (b != IGNORE)
        is_boundary[first] |= differ
        is_boundary[second] |= differ
    return np.where(is_boundary, classes, np.int16(IGNORE))


def _count_matches(
    edges: np.ndarray, others: np.ndarray, num_classes: int, tolerance: int
) -> np.ndarray:
    """Return the number of boundary pixels of each class in `edges` that match one in `others`.

    Tries all offsets up to the distance `tolerance`, the shortest ones first, with the pixels that
    are not matched yet. There are few boundary pixels, so this costs less than a distance transform
    for each class. edges, others (H, W): results of `_keep_boundary`.
    """
    others = np.pad(others, tolerance, constant_values=IGNORE)
    width = others.shape[1]
    rows, columns = np.nonzero(edges != IGNORE)
    classes = edges[rows, columns]
    places = (rows + tolerance) * width + columns + tolerance  # in `others`, flattened

    steps = np.arange(-tolerance, tolerance + 1)
    squares = steps[:, None] ** 2 + steps**2
    nearest = np.argsort(squares, axis=None, kind="stable")[: np.sum(squares <= tolerance**2)]
    matched = np.zeros(num_classes, np.int64)
    for row, column in zip(*np.unravel_index(nearest, squares.shape)):
        hit = others.ravel()[places + steps[row] * width + steps[column]] == classes
        matched += np.bincount(classes[hit], minlength=num_classes)
        places, classes = places[~hit], classes[~hit]
        if not len(places):
            break
    return matched
