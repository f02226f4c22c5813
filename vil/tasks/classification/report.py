"""Run report of a classifier: metrics, table of classes, calibration, errors and images."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from vil.data.dataset import ImageDataset
from vil.engine.distributed import unwrap
from vil.engine.evaluation import evaluating
from vil.report.html import Html, render_template
from vil.tasks.base import TaskReport
from vil.tasks.classification import METRICS
from vil.tasks.classification.metrics import ClassificationMetrics
from vil.tasks.classification.predictions import Predictions
from vil.tasks.classification.task import ClassificationTask
from vil.tasks.image_report import SHOWN, make_thumbnail
from vil.tasks.metrics import NUM_BINS, calibration_bins, confusion_matrix

FULL_MATRIX = 24  # maximum number of classes for a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # maximum numbers of table rows
COLUMNS = {"precision": "precision", "f1": "F1", "auroc": "AUROC", "average_precision": "AP"}
SIDE = 160  # pixels of a thumbnail
Thumbnails = dict[int, tuple[str, bytes | None]]  # {index into the predictions: (file, JPEG)}


class Evaluated(NamedTuple):
    """Predictions of a model on a test set, with class names and thumbnails for the report."""

    test_set: str
    predictions: Predictions
    classes: list[str]  # of the test set
    predicted_names: list[str]  # of the model's classes
    same: bool  # whether test set and model have the same classes
    thumbnails: Thumbnails


def report_test_set(
    task: ClassificationTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate a model on the first test set, and return cards and sections of the run report.

    class_names: names of the model's classes. checkpoint: description of the checkpoint, which is
    shown on a card.
    """
    test_set, loader = next(iter(task.test_sets.items()))
    with evaluating(unwrap(model)) as plain:
        predictions = task.collect_predictions(plain, test_set)
    same, classes = test_set not in task.class_mapping, loader.classes
    predicted_names = classes if same else list(class_names)
    thumbnails = make_thumbnails(loader.dataset, predictions)
    evaluated = Evaluated(test_set, predictions, classes, predicted_names, same, thumbnails)
    metrics = ClassificationMetrics(predictions, len(predicted_names), is_mapped=not same)
    averages = metrics.averages()
    remark = f"of the same checkpoint, on {test_set}, {averages['count']:,} images"
    scaled = f", with temperature {task.temperature:.4f}" if task.temperature else ""
    titles = {"top5": "Top-5", "balanced_accuracy": "Balanced accuracy"}
    shown = {title: averages[key] for key, title in titles.items() if key in averages}
    cards = [
        ("Top-1, evaluated for this page", f"{averages['top1']:.2f}%", checkpoint),
        *((title, f"{value:.2f}%", remark) for title, value in shown.items()),
        ("Loss", f"{averages['loss']:.4f}", f"cross entropy of the same checkpoint{scaled}"),
    ]
    return TaskReport(cards, sections_of(evaluated, metrics))


def make_thumbnails(dataset: ImageDataset, predictions: Predictions) -> Thumbnails:
    """Make thumbnails of the images that `Predictions.extremes` selects for the report.

    dataset: the test set. Returns {index into the arrays of `predictions`: (file, JPEG)}. The JPEG
    is None if the image can no longer be read.
    """
    thumbnails = {}
    for i in np.concatenate(list(predictions.extremes(SHOWN).values())).tolist():
        made = make_thumbnail(dataset, int(predictions.indices[i]), side=SIDE)
        thumbnails[i] = made.name, made.jpeg
    return thumbnails


def sections_of(evaluated: Evaluated, metrics: ClassificationMetrics) -> list[Html]:
    """Render the report's sections as HTML: metrics, table of classes, errors, and images.

    The table lists the classes that have images, lowest accuracy first. If there are more than
    MOST_CLASSES, it lists only the worst and the best. The confusion matrix is shown if the test
    set and the model have the same classes, and at most FULL_MATRIX of them. metrics: of the
    predictions in `evaluated`.
    """
    test_set, predictions, classes = evaluated.test_set, evaluated.predictions, evaluated.classes
    table = metrics.per_class(len(classes))
    correct, count = map(np.array, (table.pop("right"), table.pop("count")))
    table.pop("recall", None)  # the accuracy
    accuracy = correct / np.maximum(count, 1)
    order = [n for n in np.argsort(accuracy, kind="stable").tolist() if count[n]]
    caption = f"Metrics of each class of {test_set}, the lowest accuracy (recall) first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = f"Classes of {test_set}: the {half} worst and best of {len(order)} classes"
        order = order[:half] + order[-half:]
    matrix = None
    if evaluated.same and len(classes) <= FULL_MATRIX:
        matrix = confusion_matrix(predictions.targets, predictions.predicted, len(classes)).tolist()
    section = render_template(
        "tasks/classification/report.html.j2",
        **evaluated._asdict(),
        **dict(correct=correct, count=count, order=order, caption=caption),
        metrics=metric_rows(metrics),
        columns={COLUMNS[name]: column for name, column in table.items()},
        reliability=reliability_bars(predictions) if evaluated.same else None,
        matrix=matrix,
        mistakes=predictions.mistakes(MOST_MISTAKES),
        groups=predictions.extremes(SHOWN),
    )
    return [Html(section)]


def metric_rows(metrics: ClassificationMetrics) -> list[tuple[str, str, str]]:
    """Return the report's table of metrics, a list of (label, value, 95 % interval) as text."""
    intervals, rows = metrics.intervals(), []
    for name, value in metrics.averages().items():
        if name in METRICS:
            label, unit, _ = METRICS[name]
            form = f"{{:.2f}}{unit}" if unit else "{:.4f}"
            limits = [form.format(limit) for limit in intervals.get(name, ())]
            rows.append((label, form.format(value), " to ".join(limits) or "-"))
    return rows


class Bar(NamedTuple):
    """A bar of the reliability diagram.

    left: position of the left edge, as a fraction of the plot's width. width, height: fractions of
    the plot's width and height. label: text that describes the bar.
    """

    left: float
    width: float
    height: float  # accuracy
    label: str


def reliability_bars(predictions: Predictions) -> list[Bar] | None:
    """Return the bars of the reliability diagram, or None if a confidence is NaN.

    There is one bar for each bin of confidence that has images. The height of the bar is the
    accuracy of the predictions in the bin.
    """
    bins = calibration_bins(predictions.probability, predictions.correct)
    if bins is None:
        return None
    bars = []
    for i, (images, confidence, correct) in enumerate(zip(*bins)):
        if images:
            label = (
                f"{images:.0f} images with a confidence of {i / NUM_BINS:.0%} to "
                f"{(i + 1) / NUM_BINS:.0%}: accuracy {correct / images:.1%}, mean confidence "
                f"{confidence / images:.1%}"
            )
            bars.append(Bar(i / NUM_BINS, 1 / NUM_BINS, correct / images, label))
    return bars
