"""Summarize the boxes of a detection dataset, for `vil data check` and dry runs."""

import numpy as np

from vil.data.target_summary import GROUPS, TargetSummary, select_examples
from vil.tasks.detection.data.datasets import CocoDataset
from vil.utils.plural import plural


def summarize_boxes(dataset: CocoDataset) -> TargetSummary:
    """Count, for each class of a dataset, the boxes and the images with at least one such box."""
    names, per_image = dataset.classes, dataset.last - dataset.first
    rows = np.concatenate([np.arange(*ends) for ends in zip(dataset.first, dataset.last)] or [[]])
    images = np.repeat(np.arange(len(dataset)), per_image)
    labels = dataset.labels[rows.astype(np.int64)]
    boxes = np.bincount(labels, minlength=len(names) + 1)[1:].tolist()
    pairs = np.unique(np.stack([labels, images]), axis=1)
    counts = np.bincount(pairs[0], minlength=len(names) + 1)[1:].tolist()
    listed = ", ".join(f"{name} {count}" for name, count in list(zip(names, boxes))[:GROUPS])
    more = ", ..." if len(names) > GROUPS else ""
    notes = [
        f"{plural(len(labels), 'box', 'boxes')}; {describe_empty(dataset)}",
        f"boxes per class: {listed}{more}",
    ]
    groups = [
        (name, select_examples(pairs[1][pairs[0] == label]))
        for label, name in enumerate(names[:GROUPS], 1)
    ]
    return TargetSummary(dict(zip(names, counts)), {}, notes, groups)


def describe_empty(dataset: CocoDataset) -> str:
    """Return a text with the number of images of a dataset, also of those that it omits, and how
    many of them have no usable box."""
    omitted = dataset.num_empty - int((dataset.last == dataset.first).sum())
    box = "box" if dataset.segmentations is None else "box and mask"
    end = ", which training leaves out (DETECTION.INPUT.KEEP_EMPTY)" if omitted else ""
    images = plural(len(dataset) + omitted, "image")
    return f"{images}, {dataset.num_empty} of them without a usable {box}{end}"
