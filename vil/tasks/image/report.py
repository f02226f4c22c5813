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
from vil.tasks.image.target import Outputs, TestSet
from vil.tasks.metrics import NUM_BINS, calibration_bins, confusion_matrix
from vil.utils.plot_text import plot_text

SIDE = 128  # pixels of the longer side of a shown image
SHOWN = 12  # images of a gallery
CLASS_SIDE = 160  # pixels of the longer side of a shown image in a classifier's report
FULL_MATRIX = 24  # maximum number of classes for a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # maximum numbers of table rows
COLUMNS = {"precision": "precision", "f1": "F1", "auroc": "AUROC", "average_precision": "AP"}
MAX_PLOTS = 6  # maximum number of predicted numbers that are plotted
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
    panels = figure.subplots(-(-count // 3), min(count, 3), squeeze=False).ravel()
    for panel in panels[count:]:
        panel.set_axis_off()
    for panel, name, true, predicted in zip(panels, names, outputs.targets.T, outputs.values.T):
        panel.scatter(true, predicted, s=6, alpha=0.5)
        panel.axline((float(true.mean()), float(true.mean())), slope=1, color="gray", linewidth=1)
        panel.set(title=plot_text(name[:40]), xlabel="true", ylabel="predicted")
    return figure


def report_classes(
    predictions: Predictions,
    test_set: TestSet,
    class_names: Sequence[str],
    checkpoint: str,
    *,
    is_mapped: bool = False,
    temperature: float | None = None,
) -> TaskReport:
    """Return cards and a section of the run report of a classifier: metrics, table of classes,
    errors, and images.

    The table lists the classes that have images, lowest accuracy first. If there are more than
    MOST_CLASSES, it lists only the worst and the best. The confusion matrix is shown if the test
    set and the model have the same classes, and at most FULL_MATRIX of them.

    predictions: on the test set. class_names: of the model. checkpoint: description of the
    checkpoint, which is shown on a card. is_mapped: whether the test set has other classes than the
    model. temperature: that the logits are divided by, if the model is calibrated.
    """
    metrics = ClassificationMetrics(predictions, len(class_names), is_mapped=is_mapped)
    averages, classes = metrics.averages(), test_set.classes
    remark = f"of the same checkpoint, on {test_set.name}, {averages['count']:,} images"
    scaled = f", with temperature {temperature:.4f}" if temperature else ""
    titles = {"top5": "Top-5", "balanced_accuracy": "Balanced accuracy"}
    shown = {title: averages[key] for key, title in titles.items() if key in averages}
    cards = [
        ("Top-1, evaluated for this page", f"{averages['top1']:.2f}%", checkpoint),
        *((title, f"{value:.2f}%", remark) for title, value in shown.items()),
        ("Loss", f"{averages['loss']:.4f}", f"cross entropy of the same checkpoint{scaled}"),
    ]
    table = metrics.per_class(len(classes))
    correct, count = map(np.array, (table.pop("right"), table.pop("count")))
    table.pop("recall", None)  # the accuracy
    accuracy = correct / np.maximum(count, 1)
    order = [n for n in np.argsort(accuracy, kind="stable").tolist() if count[n]]
    caption = f"Metrics of each class of {test_set.name}, the lowest accuracy (recall) first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = f"Classes of {test_set.name}: the {half} worst and best of {len(order)} classes"
        order = order[:half] + order[-half:]
    matrix = None
    if not is_mapped and len(classes) <= FULL_MATRIX:
        matrix = confusion_matrix(predictions.targets, predictions.predicted, len(classes)).tolist()
    groups = predictions.extremes(SHOWN)
    thumbnails = {
        i: make_thumbnail(test_set.dataset, int(predictions.indices[i]), side=CLASS_SIDE)
        for i in np.concatenate(list(groups.values())).tolist()
    }
    section = render_template(
        "tasks/image/class_report.html.j2",
        **dict(test_set=test_set.name, classes=classes, predicted_names=class_names),
        **dict(correct=correct, count=count, order=order, caption=caption),
        metrics=metric_rows(metrics),
        columns={COLUMNS[name]: column for name, column in table.items()},
        reliability=None if is_mapped else reliability_bars(predictions),
        bar_width=1 / NUM_BINS,
        matrix=matrix,
        mistakes=predictions.mistakes(MOST_MISTAKES),
        **dict(predictions=predictions, groups=groups, thumbnails=thumbnails),
    )
    return TaskReport(cards, [Html(section)])


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


def reliability_bars(predictions: Predictions) -> list[tuple[float, float, str]] | None:
    """Return the bars of the reliability diagram, or None if a confidence is NaN.

    There is one bar for each bin of confidence that has images: (lower edge of the bin, accuracy of
    the predictions in the bin, text that describes the bar).
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
            bars.append((i / NUM_BINS, correct / images, label))
    return bars
