"""Format predictions as text, CSV or JSON. Several tasks use these functions."""

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vil.utils.console import printable
from vil.utils.json_text import to_json

Row = tuple[str, Sequence[Any], str]  # file, values, error


def peek_target(predictions: Iterable[Any]) -> tuple[bool, Iterator[Any]]:
    """Return whether the first prediction has a target, and an iterator over all predictions."""
    predictions = iter(predictions)
    first = list(itertools.islice(predictions, 1))
    known = any(prediction.target is not None for prediction in first)
    return known, itertools.chain(first, predictions)


def format_columns(rows: Iterable[Row], names: Sequence[str]) -> Iterator[str]:
    """Format predictions as a table with aligned columns, and yield its lines.

    rows: (file, predicted values, error) of each image. The error is "" if the image could be read.
    Otherwise, the error is shown instead of the values. names: column names of the values.
    """
    lines = [("file", *map(printable, names))]
    errors = {}
    for file, values, error in rows:
        if error:
            errors[len(lines)] = f"cannot be read: {printable(error)}"
        lines.append((printable(file), *(["-"] * len(names) if error else map(str, values))))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for number, (file, *values) in enumerate(lines):
        padded = [f"{value:>{width}}" for value, width in zip(values, widths[1:])]
        shown = errors.get(number) or "  ".join(padded)
        yield f"{file:{widths[0]}}  {shown}\n"


def format_json(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Format dicts as a JSON array with one dict per line, and yield the text in chunks."""
    separator = "[\n"
    for record in records:
        yield separator + to_json(record)
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def line_writer() -> Callable[[Iterable[Any]], str]:
    """Return a function that formats a sequence of values as a line of CSV."""
    # writerow returns the return value of `write`, here the line itself
    return csv.writer(SimpleNamespace(write=str), lineterminator="\n").writerow


def csv_cell(text: str) -> str:
    """Escape carriage returns, which the csv module does not quote."""
    return text.replace("\r", "\\r")
