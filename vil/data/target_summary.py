"""Summarize the targets of a dataset: the number of images of each class or label, or the
range of each regression target.

Shapes: N images, K classes, labels or regression targets.
"""

from typing import NamedTuple

import numpy as np

from vil.data.dataset import ImageDataset
from vil.utils.plural import plural

GROUPS = 40  # classes of which example images are selected
EXAMPLES = 6  # example images of a class


class TargetSummary(NamedTuple):
    """Summary of a dataset's targets.

    counts: {class or label: number of its images}; empty for regression.
    columns: {regression target: (smallest, median, largest)}; empty for classes and labels.
    notes: lines of text with further counts.
    groups: (caption, indices of example images) for the first GROUPS (40) classes, labels or
    targets.
    """

    counts: dict[str, int]
    columns: dict[str, tuple[float, float, float]]
    notes: list[str]
    groups: list[tuple[str, list[int]]]


def summarize_targets(dataset: ImageDataset) -> TargetSummary:
    """Summarize the targets of a dataset of any `target_type`, and return a TargetSummary."""
    return SUMMARIES[dataset.target_type](dataset.targets, dataset.classes)


def summarize_classes(targets: np.ndarray, names: list[str]) -> TargetSummary:
    """Count the images of each class, and return a TargetSummary. targets: (N,) class numbers."""
    counts = np.bincount(targets, minlength=len(names)).tolist()
    groups = [
        (name, select_examples(np.flatnonzero(targets == number)))
        for number, name in enumerate(names[:GROUPS])
    ]
    return TargetSummary(dict(zip(names, counts)), {}, [], groups)


def summarize_labels(targets: np.ndarray, names: list[str]) -> TargetSummary:
    """Count the images of each label, and return a TargetSummary. targets: (N, K), 0 or 1."""
    has_label, per_image = targets > 0, (targets > 0).sum(1)
    notes = [
        f"{plural(int((per_image == 0).sum()), 'image')} without a label, "
        f"{per_image.mean() if len(per_image) else 0:.2f} labels per image on average"
    ]
    groups = [
        (name, select_examples(np.flatnonzero(has_label[:, number])))
        for number, name in enumerate(names[:GROUPS])
    ]
    return TargetSummary(dict(zip(names, has_label.sum(0).tolist())), {}, notes, groups)


def summarize_numbers(targets: np.ndarray, names: list[str]) -> TargetSummary:
    """Summarize regression targets (N, K). The TargetSummary has the smallest, median and largest
    value of each of the K targets. The example images of a target are sorted by its value."""
    if not len(targets):
        return TargetSummary({}, {}, [], [])
    ends = np.stack([targets.min(0), np.median(targets, 0), targets.max(0)], 1)
    columns = {name: (low, middle, high) for name, (low, middle, high) in zip(names, ends.tolist())}
    groups = [
        (f"{name}, ascending", select_examples(np.argsort(targets[:, number], kind="stable")))
        for number, name in enumerate(names[:GROUPS])
    ]
    return TargetSummary({}, columns, [], groups)


SUMMARIES = {
    "class": summarize_classes,
    "labels": summarize_labels,
    "numbers": summarize_numbers,
}


def select_examples(indices: np.ndarray) -> list[int]:
    """Return at most EXAMPLES of the indices, evenly spaced."""
    spaced = np.linspace(0, len(indices) - 1, min(len(indices), EXAMPLES))
    return indices[spaced.astype(np.int64)].tolist()
