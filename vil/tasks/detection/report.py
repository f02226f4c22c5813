"""Run report of a detector, as HTML: average precision, precision and recall, confusions, images.

The HTML template is report.html.j2.
"""

from collections.abc import Sequence

import numpy as np

from vil.report.charts import Chart, make_chart
from vil.report.html import Html, name, render_template
from vil.tasks.base import TaskReport
from vil.tasks.detection import METRICS, coco_eval, error_analysis
from vil.tasks.detection.coco_eval import IOU_TYPES, Evaluation
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.image.report import encode_thumbnail
from vil.utils.plural import plural

PAIR_SIDE = 720  # pixels of the longer side of a shown pair of images
SHOWN = 6  # pairs of a gallery
FULL_MATRIX = 24  # maximum number of classes for a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # maximum numbers of table rows
BACKGROUND = "background"


def report_detections(
    dataset: CocoDataset,
    results: list[dict],
    iou_types: Sequence[str],
    test_set: str,
    checkpoint: str,
) -> TaskReport:
    """Return cards and a section of the run report of a detector.

    results: detections in COCO's results format. iou_types: "bbox" for boxes, "segm" for masks.
    test_set: its name. checkpoint: description of the checkpoint, which is shown on a card.
    """
    evaluations = {
        kind: coco_eval.evaluate(dataset.annotations, results, kind) for kind in iou_types
    }
    cards, charts = [], []
    remark = f"of the same checkpoint, on {test_set}, {len(dataset):,} images"
    for kind, evaluation in evaluations.items():
        metrics = coco_eval.summarize(evaluation, kind)
        for key in (f"{IOU_TYPES[kind]}_ap", f"{IOU_TYPES[kind]}_ap50"):
            label, unit, _ = METRICS[key]
            about = remark if cards else checkpoint
            title = label if cards else f"{label}, evaluated for this page"
            cards.append((title[0].upper() + title[1:], f"{metrics[key]:.2f}{unit}", about))
        charts += plot_precision(evaluation, IOU_TYPES[kind])
    truth, rows = error_analysis.load_confident(dataset, results)
    matrix = error_analysis.count_confusions(truth, rows)
    classes = [*next(iter(evaluations.values())).classes, BACKGROUND]
    section = render_template(
        "tasks/detection/report.html.j2",
        **dict(test_set=test_set, table=class_table(evaluations), charts=charts, classes=classes),
        matrix=matrix.tolist() if len(classes) <= FULL_MATRIX + 1 else None,
        mistakes=list_mistakes(matrix, classes),
        limits=f"IoU {error_analysis.MIN_IOU:g} and score {error_analysis.MIN_SCORE:g} or more",
        galleries=draw_galleries(dataset, results),
    )
    return TaskReport(cards, [Html(section)])


def class_table(
    evaluations: dict[str, Evaluation],
) -> tuple[str, list[str], list[list]]:
    """Return the table of classes: (caption, column names, rows).

    The classes with the lowest AP come first. If there are more than MOST_CLASSES, only the worst
    and the best are listed. Classes without objects are left out.
    """
    first = next(iter(evaluations.values()))
    columns, values = ["class", "objects"], []
    for kind, evaluation in evaluations.items():
        for suffix, index in coco_eval.THRESHOLDS.items():
            columns.append(METRICS[f"{IOU_TYPES[kind]}_ap{suffix}"][0])
            precision = np.moveaxis(evaluation.precision[index, ..., 0, -1], -1, 0)
            values.append([coco_eval.mean(each) for each in precision])
    order = [n for n in np.argsort(values[0], kind="stable").tolist() if first.num_objects[n]]
    caption = "Average precision of each class in percent, the lowest first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = f"Average precision in percent: the {half} worst and best of {len(order)} classes"
        order = order[:half] + order[-half:]
    rows = [
        [name(first.classes[n]), first.num_objects[n], *(f"{column[n]:.2f}" for column in values)]
        for n in order
    ]
    return caption, columns, rows


def plot_precision(evaluation: Evaluation, prefix: str) -> list[Chart]:
    """Plot precision against recall for each class that has objects, the lowest AP first: at an IoU
    of 0.5, and averaged over the IoU thresholds from 0.5 to 0.95. prefix: "box" or "mask"."""
    thresholds = {"IoU 0.5": slice(0, 1), "IoU 0.5 to 0.95, mean": slice(None)}
    charts = []
    for about, index in thresholds.items():
        precision = 100 * evaluation.precision[index, ..., 0, -1].mean(axis=0).T  # (K, R)
        labeled = [n for n, count in enumerate(evaluation.num_objects) if count]
        curves = {
            f"{evaluation.classes[n]} {precision[n].mean():.1f}": list(
                zip((100 * evaluation.recalls).tolist(), precision[n].tolist())
            )
            for n in sorted(labeled, key=lambda n: precision[n].mean())
        }
        options = dict(thin=lambda curve: False, across="recall (%)")
        if curves:
            title = f"{prefix.capitalize()} precision, {about}"
            charts.append(make_chart(curves, title, "precision (%)", **options))
    return charts


def list_mistakes(matrix: np.ndarray, classes: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return the most frequent confusions, as (true class, detected class, count). matrix: see
    `error_analysis.count_confusions`. classes: names of its rows."""
    wrong = matrix * ~np.eye(len(matrix), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_MISTAKES].tolist()
    pairs = (divmod(place, len(matrix)) for place in order)
    return [(classes[i], classes[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j]]


def draw_galleries(
    dataset: CocoDataset, results: list[dict]
) -> list[tuple[str, list[tuple[str, str, bytes | None]]]]:
    """Draw the images with the most errors, and those in the middle of the ranking by errors.

    Returns (title, images) of each gallery. An image is (name, text, JPEG), where the JPEG is None
    if the image cannot be read.
    """
    ranking = error_analysis.rank_images(dataset, results)
    worst, rest = ranking.order[:SHOWN], ranking.order[SHOWN:]
    middle = max(len(ranking.order) // 2 - SHOWN - SHOWN // 2, 0)
    chosen = {
        "Images with the most errors": worst,
        "Typical images, with a median number of errors": rest[middle : middle + SHOWN],
    }
    galleries = []
    for title, indices in chosen.items():
        images = []
        for index in indices:
            try:
                drawing = error_analysis.draw_pair(dataset, index, ranking.rows)
                jpeg = encode_thumbnail(drawing, PAIR_SIDE)
            except OSError:
                jpeg = None
            text = plural(ranking.errors[index], "error")
            images.append((dataset.sample_name(index), text, jpeg))
        galleries.append((title, images))
    return galleries
