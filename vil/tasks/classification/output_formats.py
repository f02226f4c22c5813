"""Output formats of `vil predict`: a table, JSON, CSV.

Each takes an iterable of predictions and the class names and yields text in chunks; JSON and CSV
are streamed.
"""

import csv
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from vil.tasks.base import format_json_array

COLUMNS = ("file", "rank", "class", "index", "probability", "error")


class Prediction(NamedTuple):
    """(class index, probability) of an image, the most probable first, or an error."""

    file: str
    classes: list[tuple[int, float]]
    error: str = ""


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format a line per class, in aligned columns, after the last image."""
    rows = [("file", "class", "probability")]
    for file, classes, error in predictions:
        rows += [(file, names[index], f"{probability:11.4f}") for index, probability in classes]
        rows += [(file, "-", f"cannot be read: {error}")] if error else []
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield from (f"{file:{widths[0]}}  {name:{widths[1]}}  {last}\n" for file, name, last in rows)


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format an array, one image per line."""
    return format_json_array(to_record(prediction, names) for prediction in predictions)


def to_record(prediction: Prediction, names: list[str]) -> dict[str, Any]:
    """Convert a prediction to {file, classes: [{class, index, probability}][, error]}."""
    classes = [
        {"class": names[index], "index": index, "probability": probability}
        for index, probability in prediction.classes
    ]
    error = {"error": prediction.error} if prediction.error else {}
    return {"file": prediction.file, "classes": classes, **error}


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format a header, then a line per class, or one with the error of an unreadable image."""
    # writerow returns what `write` does: the line
    format_line = csv.writer(SimpleNamespace(write=str), lineterminator="\n").writerow
    yield format_line(COLUMNS)
    for file, classes, error in predictions:
        for rank, (index, probability) in enumerate(classes, start=1):
            yield format_line((file, rank, names[index], index, probability, ""))
        if error:
            yield format_line((file, "", "", "", "", error))


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
