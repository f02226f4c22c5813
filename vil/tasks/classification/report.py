"""A classifier's part of the run report: accuracy per class, confusions, images."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import nn

from vil.data.dataset import ImageDataset
from vil.report.html import LONGEST, Html, element, name, number, picture, table
from vil.tasks.base import TaskReport
from vil.tasks.classification.predictions import Predictions, collect_predictions
from vil.tasks.classification.task import ClassificationTask

FULL_MATRIX = 24  # most classes of a full confusion matrix
MOST_CLASSES, MOST_MISTAKES = 60, 20  # rows of tables
SIDE = 160  # pixels of a thumbnail
Thumbnails = dict[int, tuple[str, bytes | None]]  # {index in the predictions: (file, JPEG)}


class Evaluated(NamedTuple):
    """A checkpoint's predictions on a test set."""

    test_set: str
    checkpoint: str
    predictions: Predictions
    classes: list[str]  # of the test set
    predicted_names: list[str]  # of the model's classes
    same: bool  # whether test set and model have the same classes
    thumbnails: Thumbnails


def report_test_set(
    task: ClassificationTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate the first test set image by image; return its cards and sections."""
    test_set, loader = next(iter(task.test_sets.items()))
    predictions = collect_predictions(task, model, test_set)
    same, classes = test_set not in task.class_mapping, loader.classes
    evaluated = Evaluated(
        test_set,
        checkpoint,
        predictions,
        classes,
        classes if same else list(class_names),
        same,
        make_thumbnails(loader.dataset, predictions),
    )
    metrics = predictions.metrics()
    remark = f"of the same, on {test_set}, {metrics['count']:,} images"
    cards = [
        ("Top-1, evaluated for this page", f"{metrics['top1']:.2f}%", checkpoint),
        ("Top-5", f"{metrics['top5']:.2f}%", remark),
        ("Loss", f"{metrics['loss']:.4f}", "cross entropy, of the same"),
    ]
    return TaskReport(cards, sections_of(evaluated))


def make_thumbnails(dataset: ImageDataset, predictions: Predictions) -> Thumbnails:
    """Read the images of `extremes` again, by their number in the dataset."""
    thumbnails = {}
    for i in np.concatenate(list(predictions.extremes().values())).tolist():
        index = int(predictions.indices[i])
        try:
            data = thumbnail(dataset.image(index))
        except OSError:  # deleted since the evaluation
            data = None
        thumbnails[i] = dataset.sample_name(index), data
    return thumbnails


def thumbnail(image: Image.Image) -> bytes:
    """Encode a small JPEG of an RGB image."""
    small, stream = image.copy(), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def sections_of(evaluated: Evaluated) -> list[Html]:
    """Render accuracy per class, confusions, images."""
    classes = element("section", element("h2", "Classes"), class_table(evaluated))
    mixed = element("section", element("h2", "Confusions"), *confusions(evaluated))
    galleries = []
    for title, places in evaluated.predictions.extremes().items():
        if len(places):
            tiles = [tile(evaluated, i) for i in places.tolist()]
            galleries += [element("h3", title), element("ul", *tiles, class_="pictures")]
    return [
        element("div", classes, mixed, class_="beside"),
        element("section", element("h2", "Images"), *galleries),
    ]


def class_table(evaluated: Evaluated) -> Html:
    """Render the classes with images, lowest accuracy first; of many, the lowest and highest."""
    correct, count = evaluated.predictions.per_class(len(evaluated.classes))
    accuracy = correct / np.maximum(count, 1)
    order = [n for n in np.argsort(accuracy, kind="stable").tolist() if count[n]]
    caption = f"Accuracy of each class of {evaluated.test_set}, the lowest first"
    if len(order) > MOST_CLASSES:
        half = MOST_CLASSES // 2
        caption = (
            f"Accuracy on {evaluated.test_set}: the {half} worst and best of {len(order)} classes"
        )
        order = order[:half] + order[-half:]
    rows = [
        [
            name(evaluated.classes[n]),
            number(f"{correct[n]}/{count[n]}"),
            number(f"{accuracy[n]:.1%}"),
            element("span", class_="bar", style=f"--v: {accuracy[n]:.1%}", aria_hidden="true"),
        ]
        for n in order
    ]
    return table(["class", "correct", "accuracy", ""], rows, caption)


def confusions(evaluated: Evaluated) -> list[Html]:
    """Render the full confusion matrix of few classes, and the most frequent errors."""
    parts, classes = [], evaluated.classes
    if evaluated.same and len(classes) <= FULL_MATRIX:
        parts.append(matrix(evaluated.predictions.confusion(len(classes)), classes))
    mistakes = evaluated.predictions.mistakes(MOST_MISTAKES)
    if not mistakes:
        return [*parts, element("p", "No errors.")]
    _, count = evaluated.predictions.per_class(len(classes))
    rows = [
        [
            name(classes[true]),
            name(evaluated.predicted_names[predicted]),
            number(images),
            number(f"{images / count[true]:.1%}"),
        ]
        for true, predicted, images in mistakes
    ]
    head = ["true class", "predicted", "images", "of the class"]
    return [*parts, table(head, rows, "The most frequent errors")]


def matrix(counts: np.ndarray, classes: list[str]) -> Html:
    """Render counts (C, C), a row per true class and a column per predicted class."""
    long = "long" if max(map(len, classes)) > 4 else None
    heads = [element("span", name(label), class_=long) for label in classes]
    rows = [
        [name(label), *(_cell(n, sum(row), correct=true == i) for i, n in enumerate(row))]
        for true, (label, row) in enumerate(zip(classes, counts.tolist()))
    ]
    corner = element("span", "true \\ predicted", class_="corner")
    caption = "Confusion matrix: images by true class (row) and predicted class (column)"
    return table([corner, *heads], rows, caption, class_="matrix")


def _cell(images: int, total: int, correct: bool) -> Html:
    """Color a cell by its share of the class; 1 % of errors is visible already."""
    if not images:
        return element("td", 0, class_="none")
    share = images / total
    strength = 0.1 + 0.5 * (share if correct else share**0.5)
    return element(
        "td", images, class_="right" if correct else "wrong", style=f"--v: {strength:.0%}"
    )


def tile(evaluated: Evaluated, i: int) -> Html:
    """Render an image with its class, its prediction and its loss."""
    predictions, (file, data) = evaluated.predictions, evaluated.thumbnails[i]
    true = evaluated.classes[predictions.targets[i]]
    predicted = name(evaluated.predicted_names[predictions.predicted[i]])
    correct = bool(predictions.correct[i])
    alt = f"An image of class {true[:LONGEST]}, classified {'' if correct else 'in'}correctly"
    missing = element("span", "cannot be read any more", class_="gone")
    loss = f"loss {predictions.loss[i]:.3g}" if predictions.has_loss[i] else "no loss"
    probability = f" {predictions.probability[i]:.1%}"
    lines = [
        element("span", "true: ", name(true)),
        element(
            "span", "predicted: ", predicted, probability, class_="right" if correct else "wrong"
        ),
        element("span", loss),
        element("span", name(file), class_="quiet"),
    ]
    return element(
        "li", missing if data is None else picture(data, "jpeg", alt), element("div", *lines)
    )
