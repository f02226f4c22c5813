"""Output formats of `vil predict` for multilabel classification: a table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the names of the K labels, and
yields chunks of text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vil.tasks.base import format_json_array
from vil.tasks.text_formats import format_columns, format_csv


class Prediction(NamedTuple):
    """The predicted labels of one image, or an error."""

    file: str
    labels: list[int]  # indices of the labels whose probability reaches their threshold
    probabilities: list[float]  # of all K labels; empty if the image could not be read
    error: str = ""  # why the image could not be read


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as two columns: the file, and the labels with their probabilities."""
    rows = ((p.file, [", ".join(describe(p, names)) or "none"], p.error) for p in predictions)
    return format_columns(rows, ["labels"])


def describe(prediction: Prediction, names: list[str]) -> list[str]:
    """Return the labels of a prediction with their probabilities, as text."""
    return [f"{names[i]} {prediction.probabilities[i]:.2f}" for i in prediction.labels]


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line.

    An item is {file, labels, probabilities: {label: probability}, error}. `error` is present only
    if the image could not be read.
    """
    return format_json_array(
        {
            "file": prediction.file,
            "labels": [names[index] for index in prediction.labels],
            "probabilities": dict(zip(names, prediction.probabilities)),
            **({"error": prediction.error} if prediction.error else {}),
        }
        for prediction in predictions
    )


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV, with the columns file, probability of each label, and error."""
    return format_csv(((p.file, p.probabilities, p.error) for p in predictions), names)


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
