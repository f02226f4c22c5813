"""Run report of a task with one target per image: cards, tables, plots and images, as HTML.

The HTML templates are report.html.j2 and, for a classifier's metrics, classes, calibration,
confusions and images, class_report.html.j2.
"""

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vil.data.bands import BandImage, to_display
from vil.data.dataset import ImageDataset
from vil.report.html import Html, render_template
from vil.tasks.base import TaskReport
from vil.tasks.image import CLASS_METRICS
from vil.tasks.image.class_metrics import ClassificationMetrics, Predictions
from vil.tasks.image.target import Outputs
from vil.tasks.metrics import NUM_BINS, calibration_bins, confusion_matrix
from vil.utils.plot_text import plot_text

SIDE = 128  # pixels of the longer side of a shown image
SHOWN = 12  # images of a gallery
CLASS_SIDE = 160  # pixels of the longer side of a shown image in a classifier's report
FULL_MATRIX = 24  # maximum number of classes for a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # maximum numbers of table rows
COLUMNS = {"precision": "precision", "f1": "F1", "auroc": "AUROC", "average_precision": "AP"}
MAX_PLOTS = 6  # maximum number of predicted numbers that are plotted
Thumbnails = dict[int, tuple[str, bytes | None]]  # {index into the predictions: (file, JPEG)}
# (title, index of each image in the test set, positions with the worst first, text for a position)
WorstImages = tuple[str, np.ndarray, np.ndarray, Callable[[int], Sequence[str]]]


class ReportTable(NamedTuple):
    """A table with a caption, column names, and rows of text.

    The first column of each row is a name. The other columns are numbers, formatted as text.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Thumbnail(NamedTuple):
    """A small image with text for a gallery. `jpeg` is None if the image can no longer be read."""

    name: str
    lines: Sequence[str]  # text below the image
    jpeg: bytes | None


def render_report(
    dataset: ImageDataset,
    table: ReportTable,
    images: WorstImages,
    figures: Sequence[tuple[str, Figure]] = (),
) -> Html:
    """Render a table, figures and the images with the most errors as HTML.

    figures: list of (title, figure). images: the first SHOWN of them are shown.
    """
    title, indices, worst, describe = images
    gallery = [
        make_thumbnail(dataset, int(indices[i]), describe(i)) for i in worst[:SHOWN].tolist()
    ]
    drawn = [(caption, _to_png(figure)) for caption, figure in figures]
    shown = dict(tables=[table], figures=drawn, galleries=[(title, gallery)])
    return Html(render_template("tasks/image/report.html.j2", **shown))


def make_thumbnail(
    dataset: ImageDataset, index: int, lines: Sequence[str] = (), side: int = SIDE
) -> Thumbnail:
    """Make a thumbnail of the image `index` of a dataset.

    lines: lines of text to show below the image. side: maximum width and height in pixels.
    """
    try:
        jpeg = encode_thumbnail(dataset.image(index), side)
    except OSError:  # deleted since the evaluation
        jpeg = None
    return Thumbnail(dataset.sample_name(index), lines, jpeg)


def encode_thumbnail(image: Image.Image | BandImage, side: int = SIDE) -> bytes:
    """Encode an image as JPEG, reduced to at most `side` pixels in width and height."""
    small, stream = to_display(image), io.BytesIO()
    small.thumbnail((side, side))
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _to_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def plot_predictions(outputs: Outputs, names: Sequence[str]) -> Figure:
    """Plot predicted numbers against true numbers, with one panel for each of the K numbers.

    names: names of the K numbers. Only the first MAX_PLOTS of them are plotted.
    """
    count = min(len(names), MAX_PLOTS)
    figure = Figure(figsize=(4 * min(count, 3), 3.6 * -(-count // 3)), layout="constrained")
    panels = figure.subplots(-(-count // 3), min(count, 3), squeeze=False).flat
    for panel, name, true, predicted in zip(panels, names, outputs.targets.T, outputs.values.T):
        panel.scatter(true, predicted, s=6, alpha=0.5)
        panel.axline((float(true.mean()), float(true.mean())), slope=1, color="gray", linewidth=1)
        panel.set(title=plot_text(name[:40]), xlabel="true", ylabel="predicted")
    return figure


class Evaluated(NamedTuple):
    """Predictions of a model on a test set, with class names and thumbnails for the report."""

    test_set: str
    predictions: Predictions
    classes: Sequence[str]  # of the test set
    predicted_names: Sequence[str]  # of the model's classes
    same: bool  # whether test set and model have the same classes
    thumbnails: Thumbnails


def report_classes(evaluated: Evaluated, checkpoint: str, temperature: float | None) -> TaskReport:
    """Return cards and sections of the run report of a classifier.

    checkpoint: description of the checkpoint, which is shown on a card. temperature: that the
    logits are divided by, if the model is calibrated.
    """
    num_classes, is_mapped = len(evaluated.predicted_names), not evaluated.same
    metrics = ClassificationMetrics(evaluated.predictions, num_classes, is_mapped=is_mapped)
    averages = metrics.averages()
    remark = f"of the same checkpoint, on {evaluated.test_set}, {averages['count']:,} images"
    scaled = f", with temperature {temperature:.4f}" if temperature else ""
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
        made = make_thumbnail(dataset, int(predictions.indices[i]), side=CLASS_SIDE)
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
        "tasks/image/class_report.html.j2",
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
        if name in CLASS_METRICS:
            label, unit, _ = CLASS_METRICS[name]
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
