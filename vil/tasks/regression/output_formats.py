"""Output formats of `vil predict` for regression: a table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the names of the K numbers, and
yields chunks of text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vil.tasks.text_formats import format_columns, format_csv, format_json, peek_target


class Prediction(NamedTuple):
    """The predicted numbers of one image, or the error if the image is unreadable."""

    file: str
    numbers: list[float]  # K numbers, or none if the image could not be read
    error: str = ""  # why the image could not be read
    target: str | None = None  # the image's true numbers, separated by spaces, if known


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a table with aligned columns, with one line per image.

    If the true numbers are known, the second column, "target", has all true numbers of the image.
    names: names of the predicted numbers.
    """
    has_target, predictions = peek_target(predictions)
    rows = (
        (p.file, [p.target] * has_target + [f"{number:.6g}" for number in p.numbers], p.error)
        for p in predictions
    )
    return format_columns(rows, ["target"] * has_target + names)


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line.

    Each element is {file, numbers: {name: number}, target, error}. `target` has all true numbers as
    one string, and is present only if they are known. `error` is present only if the image could
    not be read. names: names of the predicted numbers.
    """
    return format_json(
        {
            "file": prediction.file,
            "numbers": dict(zip(names, prediction.numbers)),
            **({"target": prediction.target} if prediction.target is not None else {}),
            **({"error": prediction.error} if prediction.error else {}),
        }
        for prediction in predictions
    )


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV, with one line per image.

    The columns are `file`, one column for each predicted number, `target`, and `error`. `target`
    has all true numbers of the image, and is present only if the true numbers are known.
    names: names of the predicted numbers.
    """
    has_target, predictions = peek_target(predictions)
    rows = ((p.file, p.numbers, p.error, p.target or "") for p in predictions)
    return format_csv(rows, names, has_target=has_target)


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
