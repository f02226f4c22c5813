"""A classifier's part of a run's page: accuracy per class, confusions, images."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import nn

from vil.data.dataset import ImageDataset
from vil.report.html import LONGEST, Html, element, name, number, picture, scrolled, table
from vil.tasks.base import TaskReport
from vil.tasks.classification.collect_predictions import collect_predictions
from vil.tasks.classification.predictions import Predictions
from vil.tasks.classification.task import ClassificationTask

FULL_MATRIX = 24  # classes up to which all pairs are shown
MOST_CLASSES, MOST_MISTAKES = 60, 20
SIDE = 160  # pixels of a thumbnail, shown at about that size
GONE = "cannot be read any more"


class Evaluated(NamedTuple):
    """A checkpoint's predictions on a test set.

    classes: the names of the test set's. predicted_names: those of the model's. same: whether the
    two are the same classes. thumbnails: {position in the predictions: (file, JPEG or None)}.
    """

    test_set: str
    checkpoint: str
    predictions: Predictions
    classes: list[str]
    predicted_names: list[str]
    same: bool
    thumbnails: dict[int, tuple[str, bytes | None]]


def report_on(
    task: ClassificationTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate the first test set image by image; the cards and sections that show it."""
    test_set, loader = next(iter(task.test_sets.items()))
    predictions = collect_predictions(task, model, test_set)
    same = test_set not in task.class_mapping
    found = Evaluated(
        test_set=test_set,
        checkpoint=checkpoint,
        predictions=predictions,
        classes=loader.classes,
        predicted_names=loader.classes if same else list(class_names),
        same=same,
        thumbnails=make_thumbnails(loader.dataset, predictions),
    )
    return TaskReport(cards_of(found), sections_of(found))


def make_thumbnails(
    dataset: ImageDataset, predictions: Predictions
) -> dict[int, tuple[str, bytes | None]]:
    """{position in the predictions: (the image's name, its JPEG)} of those that are shown, read
    again by their number in the set."""
    found = {}
    for place in (int(n) for places in predictions.extremes().values() for n in places):
        index = int(predictions.indices[place])
        try:
            data = thumbnail(dataset.image(index))
        except OSError:  # deleted since
            data = None
        found[place] = dataset.sample_name(index), data
    return found


def cards_of(found: Evaluated) -> list[tuple[str, str, str]]:
    """Top-1, top-5 and loss."""
    metrics = found.predictions.metrics()
    where = f"of the same, on {found.test_set}, {metrics['count']:,} images"
    return [
        ("Top-1, evaluated for this page", f"{metrics['top1']:.2f}%", found.checkpoint),
        ("Top-5", f"{metrics['top5']:.2f}%", where),
        ("Loss", f"{metrics['loss']:.4f}", "cross entropy, of the same"),
    ]


def thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of an RGB picture."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def sections_of(found: Evaluated) -> list[Html]:
    """Accuracy per class, confusions, pictures."""
    classes = element("section", element("h2", "Classes"), per_class(found))
    mixed = element("section", element("h2", "Confusions"), *confusions(found))
    return [
        element("div", classes, mixed, class_="beside"),
        element("section", element("h2", "Pictures"), *pictures(found)),
    ]


def per_class(found: Evaluated) -> Html:
    """The classes with images, the worst first; of very many the two ends."""
    right, count = found.predictions.per_class(len(found.classes))
    share = right / np.maximum(count, 1)
    order = [n for n in np.argsort(share, kind="stable").tolist() if count[n]]
    caption = f"Accuracy of each class of {found.test_set}, the lowest first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = f"Accuracy on {found.test_set}: the {half} worst and best of {len(order)} classes"
        order = order[:half] + order[-half:]
    rows = [
        [
            name(found.classes[n]),
            number(f"{right[n]}/{count[n]}"),
            number(f"{share[n]:.1%}"),
            element("span", class_="bar", style=f"--v: {share[n]:.1%}", aria_hidden="true"),
        ]
        for n in order
    ]
    return table(["class", "right", "accuracy", ""], rows, caption)


def confusions(found: Evaluated) -> list[Html]:
    """All pairs of few classes; the most frequent mistakes of any number."""
    parts = []
    if found.same and len(found.classes) <= FULL_MATRIX:
        parts.append(matrix(found.predictions.confusion(len(found.classes)), found.classes))
    mistakes = found.predictions.mistakes(MOST_MISTAKES)
    if not mistakes:
        return [*parts, element("p", "Not one wrong answer.")]
    _, count = found.predictions.per_class(len(found.classes))
    rows = [
        [
            name(found.classes[true]),
            name(found.predicted_names[answer]),
            number(times),
            number(f"{times / count[true]:.1%}"),
        ]
        for true, answer, times in mistakes
    ]
    head = ["true class", "answer", "images", "of the class"]
    return [*parts, table(head, rows, "The most frequent mistakes")]


def matrix(counts: np.ndarray, classes: list[str]) -> Html:
    """counts (C, C) as a table: a row per true class, a column per answer."""
    long = max(map(len, classes)) > 4
    names = [
        element("th", element("span", name(c), class_="long" if long else None), scope="col")
        for c in classes
    ]
    rows = []
    for true, (label, row) in enumerate(zip(classes, counts.tolist())):
        cells = [_cell(n, sum(row), right=true == at) for at, n in enumerate(row)]
        rows.append(element("tr", element("th", name(label), scope="row"), *cells))
    corner = element("th", "true \\ answer", scope="col", class_="corner")
    caption = "Images of each true class (row) by answer (column)"
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", corner, *names)),
        element("tbody", *rows),
        class_="matrix",
    )
    return scrolled(content, "Confusion matrix")


def _cell(times: int, total: int, right: bool) -> Html:
    """Coloured by its share of the class; a mistake in a hundred is visible already."""
    if not times:
        return element("td", 0, class_="none")
    share = times / total
    strength = 0.1 + 0.5 * (share if right else share**0.5)
    kind = "right" if right else "wrong"
    return element("td", times, class_=kind, style=f"--v: {strength:.0%}")


def pictures(found: Evaluated) -> list[Html]:
    """A gallery of each kind of extremes."""
    parts = []
    for title, places in found.predictions.extremes().items():
        if len(places):
            tiles = [tile(found, int(place)) for place in places]
            parts += [element("h3", title), element("ul", *tiles, class_="pictures")]
    return parts


def tile(found: Evaluated, place: int) -> Html:
    """A picture with its class, the answer and its probability."""
    answers, (file, data) = found.predictions, found.thumbnails[place]
    true = name(found.classes[answers.targets[place]])
    answer = name(found.predicted_names[answers.predicted[place]])
    right = bool(answers.right[place])
    share = f"{answers.probability[place]:.1%}"
    described = (
        f"An image of class {found.classes[answers.targets[place]][:LONGEST]}, "
        f"answered {'rightly' if right else 'wrongly'}"
    )
    shown = (
        element("span", GONE, class_="gone") if data is None else picture(data, "jpeg", described)
    )
    lines = [
        element("span", "true: ", true),
        element("span", "answer: ", answer, f" {share}", class_="right" if right else "wrong"),
        element("span", f"loss {answers.loss[place]:.3g}" if answers.judged[place] else "no loss"),
        element("span", name(file), class_="quiet"),
    ]
    return element("li", shown, element("div", *lines))
