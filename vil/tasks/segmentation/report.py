"""Run report of a segmentation model, as HTML, and drawings of the images with the lowest mIoU.

Shapes: K classes, image height H and width W. The HTML template is report.html.j2.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.bands import to_display
from vil.data.dataset import LoadableDataset
from vil.report.html import Html, render_template
from vil.tasks.base import TaskReport
from vil.tasks.image.report import FULL_MATRIX, MOST_CLASSES, MOST_MISTAKES, encode_thumbnail
from vil.tasks.segmentation import IGNORE, metrics
from vil.tasks.segmentation.metrics import Counts
from vil.tasks.segmentation.predictions import add_legend, colorize, encode_png
from vil.utils.contact_sheet import save_ranked, shorten, stack_side_by_side
from vil.utils.image_text import enlarge, font_for

TITLES = ("image", "truth", "prediction")
SIDE = 360  # pixels of the longer side of a shown image
OTHERS = "other classes"
# (index in the test set, mIoU in percent, (H, W) predicted class numbers) of images with a low mIoU
Worst = Sequence[tuple[int, float, np.ndarray]]


def report_segmentation(
    dataset: LoadableDataset, counts: Counts, worst: Worst, test_set: str, checkpoint: str
) -> TaskReport:
    """Return cards and a section of the run report of a segmentation model.

    dataset: a MaskDataset, the test set. counts: of its pixels. test_set: its name. checkpoint:
    description of the checkpoint, which is shown on a card.
    """
    values, confusion = metrics.values(counts), counts.confusion
    remark = f"of the same checkpoint, on {test_set}"
    cards = [
        ("mIoU, evaluated for this page", percent(values["miou"], "%"), checkpoint),
        ("Pixel accuracy", percent(values["pixel_accuracy"], "%"), remark),
        ("Boundary F1", percent(values["boundary_f1"], "%"), remark),
        ("Images", f"{len(dataset):,}", f"with {confusion.sum():,} labeled pixels"),
    ]
    caption, table = class_table(counts, dataset.classes)
    heading, columns, matrix = confusion_table(confusion, dataset.classes)
    section = render_template(
        "tasks/segmentation/report.html.j2",
        **dict(test_set=test_set, classes=dataset.classes, caption=caption, table=table),
        colors=[f"rgb({red} {green} {blue})" for red, green, blue in dataset.palette.tolist()],
        **dict(heading=heading, columns=columns, matrix=matrix),
        mistakes=list_mistakes(confusion),
        **dict(titles=TITLES, images=show_worst(dataset, worst)),
    )
    return TaskReport(cards, [Html(section)])


def percent(value: float, unit: str = "") -> str:
    """Format a metric in percent; NaN is "absent"."""
    return "absent" if np.isnan(value) else f"{value:.2f}{unit}"


def class_table(
    counts: Counts, classes: Sequence[str]
) -> tuple[str, list[tuple[int, float, list[str]]]]:
    """Return the table of classes: (caption, rows of (class number, IoU in percent, cells)).

    The cells are IoU, accuracy, boundary F1 and the share of the labeled pixels. The classes with
    the lowest IoU come first, and those that do not occur last. If there are more than
    MOST_CLASSES, only the worst and the best are listed.
    """
    pixels, iou = counts.confusion.sum(axis=1), counts.iou()
    columns = iou, counts.class_counts().recall(), counts.boundary_f1()
    order = np.argsort(iou, kind="stable").tolist()  # NaN last
    caption = "Metrics of each class in percent, the lowest IoU first"
    if len(order) > MOST_CLASSES:
        half, present = MOST_CLASSES // 2, [n for n in order if not np.isnan(iou[n])]
        caption = (
            f"Metrics in percent: the {half} worst and best of {len(present)} classes; "
            f"{len(order) - len(present)} do not occur"
        )
        order = present[:half] + present[half:][-half:]
    shares = 100 * pixels / max(pixels.sum(), 1)
    rows = [
        (n, iou[n], [*(percent(column[n]) for column in columns), f"{shares[n]:.2f}"])
        for n in order
    ]
    return caption, rows


def confusion_table(
    confusion: np.ndarray, classes: Sequence[str]
) -> tuple[str, list[str], list[list[int]]]:
    """Return the confusion matrix to show: (caption, names of the columns, rows of counts).

    If there are more than FULL_MATRIX classes, it has the rows of those with the most errors, and a
    last column for all others.
    """
    caption = "Share of the pixels of a true class (row) with a predicted class (column) in percent"
    if len(classes) <= FULL_MATRIX:
        return caption, list(classes), confusion.tolist()
    wrong = confusion * ~np.eye(len(classes), dtype=bool)
    errors = wrong.sum(axis=0) + wrong.sum(axis=1)
    shown = np.sort(np.argsort(-errors, kind="stable")[:FULL_MATRIX])
    rest = np.delete(confusion, shown, axis=1)[shown].sum(axis=1, keepdims=True)
    matrix = np.concatenate([confusion[shown][:, shown], rest], axis=1)
    caption += f": the {FULL_MATRIX} of {len(classes)} classes with the most errors"
    return caption, [*(classes[n] for n in shown), OTHERS], matrix.tolist()


def list_mistakes(confusion: np.ndarray) -> list[tuple[int, int, int, float]]:
    """Return the most frequent confusions, as (true class, predicted class, number of pixels, share
    of the true class in percent)."""
    wrong = confusion * ~np.eye(len(confusion), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_MISTAKES].tolist()
    pairs = (divmod(place, len(wrong)) for place in order)
    return [
        (i, j, int(wrong[i, j]), 100 * wrong[i, j] / confusion[i].sum())
        for i, j in pairs
        if wrong[i, j]
    ]


def show_worst(
    dataset: LoadableDataset, worst: Worst
) -> list[tuple[str, str, list[int], list[tuple[str, bytes]] | None]]:
    """Return the images of the page: (name, mIoU as text, classes in its truth or prediction, three
    panels). A panel is (MIME type, content of the file). The panels are None if the image cannot be
    read."""
    shown = []
    for index, value, predicted in worst:
        try:
            image, truth = to_display(dataset.image(index)), dataset.mask(index)
        except OSError:
            present, panels = [], None
        else:
            present = classes_in(truth, predicted)
            scale = SIDE / max(image.size)
            size = tuple(max(round(side * scale), 1) for side in image.size)
            maps = (colorize(classes, dataset.palette, size) for classes in (truth, predicted))
            panels = [("image/jpeg", encode_thumbnail(image, SIDE))]
            panels += [("image/png", encode_png(each)) for each in maps]
        shown.append((dataset.sample_name(index), f"mIoU {percent(value, '%')}", present, panels))
    return shown


def draw_worst(dataset: LoadableDataset, worst: Worst, folder: Path, name: str) -> list[Path]:
    """Draw images, each with its truth and its prediction, and return the paths of the drawings.
    dataset: a MaskDataset. folder, name: see `save_ranked`."""
    predictions = {index: predicted for index, _, predicted in worst}

    def draw(index: int) -> Image.Image:
        canvas, _ = enlarge(to_display(dataset.image(index)))
        maps = dataset.mask(index), predictions[index]
        panels = [canvas, *(colorize(each, dataset.palette, canvas.size) for each in maps)]
        labels = [(shorten(dataset.classes[n]), dataset.palette[n]) for n in classes_in(*maps)]
        return add_legend(stack_side_by_side(panels, TITLES), labels, font_for(canvas))

    indices = list(predictions)
    return save_ranked(indices, len(indices), draw, dataset.sample_name, folder, name)


def classes_in(truth: np.ndarray, predicted: np.ndarray) -> list[int]:
    """Return the classes that occur in an image or its prediction."""
    return np.setdiff1d(np.union1d(truth, predicted), [IGNORE]).tolist()
