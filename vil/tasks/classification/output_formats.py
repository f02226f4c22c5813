"""Output formats of `vil predict`: aligned table, JSON, CSV, and CSV with all probabilities.

Each format is a function that takes an iterable of predictions and the class names, and yields
pieces of text. All formats except the table are streamed. Ground-truth classes are written if the
first prediction has one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vil.tasks.text_formats import csv_cell as cell
from vil.tasks.text_formats import format_csv, format_json, line_writer, peek_target
from vil.utils.console import printable

COLUMNS = ("file", "rank", "class", "index", "probability", "error")


class Prediction(NamedTuple):
    """The most probable classes of one image, or the error if the image is unreadable."""

    file: str
    classes: list[tuple[int, float]]  # (class index, probability), most probable first
    error: str = ""  # why the image could not be read
    target: str | None = None  # the image's true class, if known
    names: Sequence[str] = ()  # of `classes`


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a table with aligned columns, with one line per predicted class.

    An image without predicted classes has a line with the class "none". names: class names.
    """
    rows = [("file", "class", "probability")]
    has_target, predictions = peek_target(predictions)
    if has_target:
        rows = [("file", "target", "class", "probability")]
    for file, classes, error, target, _ in predictions:
        start = (printable(file), printable(target or "")) if has_target else (printable(file),)
        rows += [(*start, printable(names[i]), f"{share:11.4f}") for i, share in classes]
        if error or not classes:
            last = ("-", f"cannot be read: {printable(error)}") if error else ("none", "")
            rows.append((*start, *last))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *cells, last in rows:
        yield "".join(f"{text:{width}}  " for text, width in zip(cells, widths)) + f"{last}\n"


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line."""
    return format_json(to_record(prediction, names) for prediction in predictions)


def to_record(prediction: Prediction, names: list[str]) -> dict[str, Any]:
    """Convert a prediction to {file, classes: [{class, index, probability}], target, error}.

    `target` is present only if the ground-truth class is known, and `error` only if the image could
    not be read. names: class names, in the order of the class indices.
    """
    classes = [
        {"class": names[index], "index": index, "probability": probability}
        for index, probability in prediction.classes
    ]
    error = {"error": prediction.error} if prediction.error else {}
    target = {"target": prediction.target} if prediction.target else {}
    return {"file": prediction.file, "classes": classes, **target, **error}


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV: a header, then one line per predicted class.

    An unreadable image has one line with the error. An image without predicted classes has one line
    without a class. If ground-truth classes are known, the last column is `target`. names: class
    names.
    """
    format_line = line_writer()
    has_target, predictions = peek_target(predictions)
    yield format_line((*COLUMNS, *(["target"] if has_target else [])))
    for file, classes, error, target, _ in predictions:
        last = [cell(target or "")] if has_target else []
        for rank, (index, probability) in enumerate(classes, start=1):
            yield format_line((cell(file), rank, cell(names[index]), index, probability, "", *last))
        if error or not classes:
            yield format_line((cell(file), "", "", "", "", cell(error), *last))


def as_probabilities(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[str]:
    """Format the probabilities of all classes as CSV, with a header and one line per image.

    The columns are `file`, one column per class, `target` if ground-truth classes are known, and
    `error`. For an unreadable image, the columns of the classes are empty.
    """
    has_target, predictions = peek_target(predictions)
    rows = (
        (p.file, [shares.get(i, "") for i in range(len(names))], p.error, cell(p.target or ""))
        for p in predictions
        for shares in [dict(p.classes)]
    )
    yield from format_csv(rows, names, has_target=has_target)


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv, "probabilities": as_probabilities}
