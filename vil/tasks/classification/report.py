"""A classifier's part of the run report: accuracy per class, confusions, images."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import nn

from vil.data.bands import BandImage, to_display
from vil.data.dataset import ImageDataset
from vil.report.html import Html, render_template
from vil.tasks.base import TaskReport
from vil.tasks.classification.predictions import Predictions, collect_predictions
from vil.tasks.classification.task import ClassificationTask

FULL_MATRIX = 24  # maximum number of classes for a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # maximum numbers of table rows
SIDE = 160  # pixels of a thumbnail
Thumbnails = dict[int, tuple[str, bytes | None]]  # {index into the predictions: (file, JPEG)}


class Evaluated(NamedTuple):
    """A model's predictions on a test set, with class names and thumbnails for the report."""

    test_set: str
    predictions: Predictions
    classes: list[str]  # of the test set
    predicted_names: list[str]  # of the model's classes
    same: bool  # whether test set and model have the same classes
    thumbnails: Thumbnails


def report_test_set(
    task: ClassificationTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate a model on the first test set, and return cards and sections for the run report.

    class_names: the model's classes. checkpoint: description of the checkpoint, for a card.
    """
    test_set, loader = next(iter(task.test_sets.items()))
    predictions = collect_predictions(task, model, test_set)
    same, classes = test_set not in task.class_mapping, loader.classes
    predicted_names = classes if same else list(class_names)
    thumbnails = make_thumbnails(loader.dataset, predictions)
    evaluated = Evaluated(test_set, predictions, classes, predicted_names, same, thumbnails)
    metrics = predictions.metrics()
    remark = f"of the same checkpoint, on {test_set}, {metrics['count']:,} images"
    cards = [
        ("Top-1, evaluated for this page", f"{metrics['top1']:.2f}%", checkpoint),
        ("Top-5", f"{metrics['top5']:.2f}%", remark),
        ("Loss", f"{metrics['loss']:.4f}", "cross entropy of the same checkpoint"),
    ]
    return TaskReport(cards, sections_of(evaluated))


def make_thumbnails(dataset: ImageDataset, predictions: Predictions) -> Thumbnails:
    """Make thumbnails of the images that the report shows, which `Predictions.extremes` selects.

    Returns {index into the predictions: (file, JPEG)}. The JPEG is None if the image can no longer
    be read.
    """
    thumbnails = {}
    for i in np.concatenate(list(predictions.extremes().values())).tolist():
        index = int(predictions.indices[i])
        try:
            data = thumbnail(dataset.image(index))
        except OSError:  # deleted since the evaluation
            data = None
        thumbnails[i] = dataset.sample_name(index), data
    return thumbnails


def thumbnail(image: Image.Image | BandImage) -> bytes:
    """Encode an image as JPEG, reduced to at most SIDE pixels per side."""
    small, stream = to_display(image), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def sections_of(evaluated: Evaluated) -> list[Html]:
    """Render accuracy per class, confusions and images as HTML with the template report.html.j2.

    The table of accuracies lists the classes that have images, lowest accuracy first. With more
    than MOST_CLASSES classes, only the worst and the best ones are listed. The full confusion
    matrix is shown for up to FULL_MATRIX classes, if test set and model have the same classes.
    """
    test_set, predictions, classes = evaluated.test_set, evaluated.predictions, evaluated.classes
    correct, count = predictions.per_class(len(classes))
    accuracy = correct / np.maximum(count, 1)
    order = [n for n in np.argsort(accuracy, kind="stable").tolist() if count[n]]
    caption = f"Accuracy of each class of {test_set}, the lowest first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = f"Accuracy on {test_set}: the {half} worst and best of {len(order)} classes"
        order = order[:half] + order[-half:]
    has_matrix = evaluated.same and len(classes) <= FULL_MATRIX
    section = render_template(
        "tasks/classification/report.html.j2",
        **evaluated._asdict(),
        **dict(correct=correct, count=count, order=order, caption=caption),
        matrix=predictions.confusion(len(classes)).tolist() if has_matrix else None,
        mistakes=predictions.mistakes(MOST_MISTAKES),
    )
    return [Html(section)]
