"""Predictions for images, and the output formats of `vil predict`: table, JSON, CSV.

Each format is a function that takes an iterable of predictions and the names of the K classes,
labels or numbers, and yields chunks of text. All formats except the tables are streamed. Targets
are written if the first prediction has one.
"""

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vil.utils.console import printable
from vil.utils.json_text import format_json

COLUMNS = ("file", "rank", "class", "index", "probability", "error")


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image, or the error if the image is unreadable."""

    file: str
    error: str = ""  # why the image could not be read
    target: str | None = None  # the image's true class, labels or numbers, if known

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the predicted values for a JSON file. names: of the classes."""
        raise NotImplementedError

    def values(self, names: Sequence[str]) -> Sequence[Any]:
        """Return K values for a CSV file with one column per name."""
        raise NotImplementedError

    def cells(self, names: Sequence[str]) -> list[str]:
        """Return the predicted values as text for a table with one line per image."""
        raise NotImplementedError

    def is_correct(self, names: Sequence[str]) -> bool | None:
        """Return whether the most probable class, or the set of predicted labels, is the target.
        Returns None for numbers, which are never exactly equal. names: of the classes."""
        return None


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """The most probable classes of one image."""

    classes: Sequence[tuple[int, float]] = ()  # (class index, probability), most probable first
    names: Sequence[str] = ()  # of `classes`

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "classes": [
                {"class": names[index], "index": index, "probability": probability}
                for index, probability in self.classes
            ]
        }

    def values(self, names: Sequence[str]) -> Sequence[Any]:
        probabilities = dict(self.classes)
        return [probabilities.get(i, "") for i in range(len(names))]

    def is_correct(self, names: Sequence[str]) -> bool:
        return bool(self.classes) and names[self.classes[0][0]] == self.target


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The predicted labels of one image. `target` has the true labels, separated by "|"."""

    labels: Sequence[int] = ()  # indices of the labels whose probability reaches their threshold
    probabilities: Sequence[float] = ()  # of all K labels; empty if the image could not be read

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        probabilities = dict(zip(names, self.probabilities))
        return {"labels": [names[i] for i in self.labels], "probabilities": probabilities}

    def values(self, names: Sequence[str]) -> Sequence[Any]:
        return self.probabilities

    def cells(self, names: Sequence[str]) -> list[str]:
        return [", ".join(self.describe(names)) or "none"]

    def is_correct(self, names: Sequence[str]) -> bool:
        return not self.error and "|".join(names[i] for i in self.labels) == self.target

    def describe(self, names: Sequence[str]) -> list[str]:
        """Return the predicted labels with their probabilities, as text."""
        return [f"{names[i]} {self.probabilities[i]:.2f}" for i in self.labels]


@dataclass(frozen=True)
class NumberPrediction(Prediction):
    """The predicted numbers of one image. `target` has the true numbers, separated by spaces."""

    numbers: Sequence[float] = ()  # K numbers, or none if the image could not be read

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        return {"numbers": dict(zip(names, self.numbers))}

    def values(self, names: Sequence[str]) -> Sequence[Any]:
        return self.numbers

    def cells(self, names: Sequence[str]) -> list[str]:
        return [f"{number:.6g}" for number in self.numbers]


def as_json(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line.

    Each element is {file, ..., target, error}, with the keys of `Prediction.record`. `target` is
    present only if it is known, and `error` only if the image could not be read.
    """
    return format_json(
        {
            "file": prediction.file,
            **prediction.record(names),
            **({"target": prediction.target} if prediction.target is not None else {}),
            **({"error": prediction.error} if prediction.error else {}),
        }
        for prediction in predictions
    )


def as_csv(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[str]:
    """Format predictions as CSV, with a header and one line per image.

    The columns are `file`, one column for each of the K names, `target` if targets are known, and
    `error`. For an unreadable image, the columns of the names are empty.
    """
    format_line = line_writer()
    has_target, predictions = peek_target(predictions)
    yield format_line(("file", *map(csv_cell, names), *["target"] * has_target, "error"))
    for p in predictions:
        last = [csv_cell(p.target or "")] * has_target + [csv_cell(p.error)]
        yield format_line((csv_cell(p.file), *(p.values(names) or [""] * len(names)), *last))


def classes_as_table(predictions: Iterable[ClassPrediction], names: Sequence[str]) -> Iterator[str]:
    """Format predicted classes as a table with aligned columns, with one line per class.

    An image without predicted classes has a line with the class "none". names: class names.
    """
    rows = [("file", "class", "probability")]
    has_target, predictions = peek_target(predictions)
    if has_target:
        rows = [("file", "target", "class", "probability")]
    for p in predictions:
        start = (printable(p.file), *([printable(p.target or "")] if has_target else []))
        rows += [(*start, printable(names[i]), f"{share:11.4f}") for i, share in p.classes]
        if p.error or not p.classes:
            last = ("-", f"cannot be read: {printable(p.error)}") if p.error else ("none", "")
            rows.append((*start, *last))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *cells, last in rows:
        yield "".join(f"{text:{width}}  " for text, width in zip(cells, widths)) + f"{last}\n"


def classes_as_csv(predictions: Iterable[ClassPrediction], names: Sequence[str]) -> Iterator[str]:
    """Format predicted classes as CSV: a header, then one line per predicted class.

    An unreadable image has one line with the error. An image without predicted classes has one line
    without a class. If ground-truth classes are known, the last column is `target`. names: class
    names.
    """
    format_line = line_writer()
    has_target, predictions = peek_target(predictions)
    yield format_line((*COLUMNS, *(["target"] if has_target else [])))
    for p in predictions:
        file, last = csv_cell(p.file), [csv_cell(p.target or "")] * has_target
        for rank, (index, probability) in enumerate(p.classes, start=1):
            yield format_line((file, rank, csv_cell(names[index]), index, probability, "", *last))
        if p.error or not p.classes:
            yield format_line((file, "", "", "", "", csv_cell(p.error), *last))


def as_table(
    predictions: Iterable[Prediction], names: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[str]:
    """Format predictions as a table with aligned columns, with one line per image.

    The columns are `file`, `target` if targets are known, and `columns`, by default the K names.
    For an unreadable image, the error is shown instead of the values.
    """
    has_target, predictions = peek_target(predictions)
    titles = [*["target"] * has_target, *(names if columns is None else columns)]
    lines, errors = [("file", *map(printable, titles))], {}
    for p in predictions:
        values = [p.target or "none"] * has_target + p.cells(names)
        if p.error:
            errors[len(lines)] = f"cannot be read: {printable(p.error)}"
            values = ["-"] * len(titles)
        lines.append((printable(p.file), *values))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for number, (file, *values) in enumerate(lines):
        padded = [f"{value:>{width}}" for value, width in zip(values, widths[1:])]
        yield f"{file:{widths[0]}}  {errors.get(number) or '  '.join(padded)}\n"


def peek_target(predictions: Iterable[Any]) -> tuple[bool, Iterator[Any]]:
    """Return whether the first prediction has a target, and an iterator over all predictions."""
    predictions = iter(predictions)
    first = list(itertools.islice(predictions, 1))
    known = any(prediction.target is not None for prediction in first)
    return known, itertools.chain(first, predictions)


def line_writer() -> Callable[[Iterable[Any]], str]:
    """Return a function that formats a sequence of values as a line of CSV."""
    # writerow returns the return value of `write`, here the line itself
    return csv.writer(SimpleNamespace(write=str), lineterminator="\n").writerow


def csv_cell(text: str) -> str:
    """Escape carriage returns, which the csv module does not quote."""
    return text.replace("\r", "\\r")
