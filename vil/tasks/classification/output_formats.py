"""Output formats of `vil predict`: a table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the class names, and yields
chunks of text. JSON and CSV are streamed; the table is yielded after the last image.
"""

import csv
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from vil.tasks.base import format_json_array
from vil.utils.console import printable

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a spreadsheet formula
COLUMNS = ("file", "rank", "class", "index", "probability", "error")


class Prediction(NamedTuple):
    """Prediction for one image: its most probable classes, or an error."""

    file: str
    classes: list[tuple[int, float]]  # (class index, probability), most probable first
    error: str = ""  # why the image could not be read


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as aligned columns, with one line per predicted class."""
    rows = [("file", "class", "probability")]
    for file, classes, error in predictions:
        file = printable(file)
        rows += [(file, printable(names[i]), f"{probability:11.4f}") for i, probability in classes]
        rows += [(file, "-", f"cannot be read: {printable(error)}")] if error else []
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield from (f"{file:{widths[0]}}  {name:{widths[1]}}  {last}\n" for file, name, last in rows)


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array, one image per line."""
    return format_json_array(to_record(prediction, names) for prediction in predictions)


def to_record(prediction: Prediction, names: list[str]) -> dict[str, Any]:
    """Convert a prediction to {file, classes: [{class, index, probability}], error}.

    `error` is left out unless the image could not be read. names: class names by index.
    """
    classes = [
        {"class": names[index], "index": index, "probability": probability}
        for index, probability in prediction.classes
    ]
    error = {"error": prediction.error} if prediction.error else {}
    return {"file": prediction.file, "classes": classes, **error}


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV: a header, then one line per predicted class.

    An unreadable image has a single line with its error.
    """
    # writerow returns the return value of `write`, here the line itself
    format_line = csv.writer(SimpleNamespace(write=str), lineterminator="\n").writerow
    yield format_line(COLUMNS)
    for file, classes, error in predictions:
        for rank, (index, probability) in enumerate(classes, start=1):
            yield format_line((cell(file), rank, cell(names[index]), index, probability, ""))
        if error:
            yield format_line((cell(file), "", "", "", "", cell(error)))


def cell(text: str) -> str:
    """Return text that is safe in a CSV cell.

    Text that a spreadsheet would run as a formula gets a leading single quote. Carriage returns are
    escaped, because the csv module does not quote them and readers would end the row there.
    """
    return (f"'{text}" if text.startswith(FORMULA) else text).replace("\r", "\\r")


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
