"""Output formats of `vil predict` for multilabel classification: a table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the names of the K labels, and
yields chunks of text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vil.tasks.text_formats import csv_cell, format_columns, format_csv, format_json, peek_target


class Prediction(NamedTuple):
    """The predicted labels of one image, or the error if the image is unreadable."""

    file: str
    labels: list[int]  # indices of the labels whose probability reaches their threshold
    probabilities: list[float]  # of all K labels; empty if the image could not be read
    error: str = ""  # why the image could not be read
    target: str | None = None  # the image's true labels, separated by "|", if known


def as_table(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as columns: the file, the true labels if they are known, and the predicted
    labels with their probabilities."""
    has_target, predictions = peek_target(predictions)
    rows = (
        (p.file, [p.target or "none"] * has_target + [", ".join(describe(p, names)) or "none"],
         p.error)
        for p in predictions
    )  # fmt: skip
    return format_columns(rows, ["target"] * has_target + ["labels"])


def describe(prediction: Prediction, names: list[str]) -> list[str]:
    """Return the predicted labels with their probabilities, as text. names: names of all labels."""
    return [f"{names[i]} {prediction.probabilities[i]:.2f}" for i in prediction.labels]


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line.

    Each element is {file, labels, probabilities: {label: probability}, target, error}. `target` is
    present only if the labels are known, and `error` only if the image could not be read.
    """
    return format_json(
        {
            "file": prediction.file,
            "labels": [names[index] for index in prediction.labels],
            "probabilities": dict(zip(names, prediction.probabilities)),
            **({"target": prediction.target} if prediction.target is not None else {}),
            **({"error": prediction.error} if prediction.error else {}),
        }
        for prediction in predictions
    )


def as_csv(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as CSV, with the columns `file`, one per label, and `error`.

    The column of a label has its probability. A column `target` is added if the true labels are
    known. names: names of the labels.
    """
    has_target, predictions = peek_target(predictions)
    rows = ((p.file, p.probabilities, p.error, csv_cell(p.target or "")) for p in predictions)
    return format_csv(rows, names, has_target=has_target)


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
