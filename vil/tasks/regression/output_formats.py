"""Output formats of `vil predict` for regression: a table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the names of the K numbers, and
yields chunks of text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vil.tasks.base import format_json_array
from vil.tasks.text_formats import format_columns, format_csv


class Prediction(NamedTuple):
    """The predicted numbers of one image, or an error."""

    file: str
    numbers: list[float]  # K numbers, or none if the image could not be read
    error: str = ""  # why the image could not be read


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as aligned columns, with one line per image."""
    rows = ((p.file, [f"{number:.4f}" for number in p.numbers], p.error) for p in predictions)
    return format_columns(rows, names)


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line.

    An item is {file, numbers: {name: number}, error}. `error` is present only if the image could
    not be read.
    """
    return format_json_array(
        {
            "file": prediction.file,
            "numbers": dict(zip(names, prediction.numbers)),
            **({"error": prediction.error} if prediction.error else {}),
        }
        for prediction in predictions
    )


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV, with the columns file, one column per number, and error."""
    return format_csv(((p.file, p.numbers, p.error) for p in predictions), names)


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
