"""Read the targets of a table: a class, several labels, or numbers per row.

Shapes: R rows, K labels or numbers.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vil.utils.errors import DataError

IF_NAMES = "; if all are names of classes, set DATA.KWARGS.text_labels True"
is_integer = re.compile(r"[+-]?\d+").fullmatch


class Location(NamedTuple):
    """The file of a table, and the line number of each row. unit: "line" or "row"."""

    path: Path
    unit: str
    lines: Sequence[int]

    def refuse(self, wrong: Sequence[bool], problem: str, texts: Sequence[str]) -> None:
        """Raise DataError if any row is wrong, with their number and the first one.

        problem: what they do, such as "have no path". texts: the wrong cell of each row.
        """
        rows = np.flatnonzero(wrong)
        if len(rows):
            count = f"{len(rows)} of {len(self.lines)} rows"
            first = f"{self.unit} {self.lines[rows[0]]}: {texts[rows[0]][:100]!r}"
            raise DataError(f"{self.path}: {count} {problem}; the first in {first}")


def read_targets(
    cells: Sequence[Sequence[str]],
    names: Sequence[str],
    target_type: str,
    where: Location,
    is_train: np.ndarray,
    *,
    separator: str,
    text_labels: bool,
    name: str,
) -> tuple[list[str], np.ndarray]:
    """Return the classes, and the targets of all rows; see `ImageDataset` for both.

    cells: the texts of each label column. names: names of these columns, if the user listed them.
    is_train: (R,) bool; the classes are those of these rows. name: the only label column, without
    `names`. Raises DataError for an invalid label.
    """
    if target_type == "numbers":
        return list(names) or [name], _read_numbers(cells, names or [name], where)
    if target_type == "labels" and names:
        return list(names), _read_indicators(cells, names, where)
    if names:
        raise DataError(
            f"{where.path}: DATA.KWARGS.label_columns is for several labels or numbers per image "
            "(TASK multilabel, regression): set label_column instead"
        )
    texts = [text.strip() for text in cells[0]]
    sets = [[label.strip() for label in text.split(separator) if label.strip()] for text in texts]
    if not text_labels:
        if target_type == "class":
            where.refuse([text.lower() in ("", "nan") for text in texts], "have no label", texts)
            problem = (
                f"have several labels, divided by {separator} (set TASK multilabel?){IF_NAMES}"
            )
            where.refuse([len(labels) > 1 for labels in sets], problem, texts)
        _refuse_mixed(sets, texts, where)
    if target_type == "labels":
        return _read_sets(sets, texts, where, is_train)
    return _read_classes(texts, where, is_train)


def _refuse_mixed(sets: list[list[str]], texts: list[str], where: Location) -> None:
    """Raise DataError unless all labels are texts, or all are integers. sets: those of each row."""
    kinds = [{_kind(label) for label in labels} for labels in sets]
    counts = Counter(itertools.chain.from_iterable(kinds))
    if not counts or set(counts) in ({"text"}, {"integer"}):
        return
    rarest = min(counts, key=lambda kind: (counts[kind], kind))
    problem = "have labels that are numbers with a fraction (set TASK regression?)"
    if len(counts) > 1:
        others = " and ".join(sorted({*counts} - {rarest}))
        problem = f"have {rarest} labels, and the others have {others} labels"
    where.refuse([rarest in of_row for of_row in kinds], problem + IF_NAMES, texts)


def _read_classes(
    texts: list[str], where: Location, is_train: np.ndarray
) -> tuple[list[str], np.ndarray]:
    where.refuse([not text for text in texts], "have no label", texts)
    classes = sorted({text for text, train in zip(texts, is_train) if train})
    if all(map(is_integer, texts)):
        classes.sort(key=int)
    numbers = {text: number for number, text in enumerate(classes)}
    unknown = [text not in numbers for text in texts]
    where.refuse(unknown, "have a class that no training image has", texts)
    return classes, np.array([numbers[text] for text in texts], np.int64)


def _kind(text: str) -> str:
    if is_integer(text):
        return "integer"
    return "text" if math.isnan(parse_number(text)) else "fractional"


def _read_sets(
    sets: list[list[str]], texts: list[str], where: Location, is_train: np.ndarray
) -> tuple[list[str], np.ndarray]:
    classes = sorted({label for labels, train in zip(sets, is_train) if train for label in labels})
    if not classes:
        raise DataError(f"{where.path}: no training image has a label")
    numbers = {text: number for number, text in enumerate(classes)}
    unknown = [any(label not in numbers for label in labels) for labels in sets]
    where.refuse(unknown, "have a label that no training image has", texts)
    targets = np.zeros((len(texts), len(classes)), np.float32)
    for row, labels in enumerate(sets):
        targets[row, [numbers[label] for label in labels]] = 1
    return classes, targets


def _read_indicators(
    cells: Sequence[Sequence[str]], names: Sequence[str], where: Location
) -> np.ndarray:
    columns = []
    for name, texts in zip(names, cells):
        values = np.array([parse_number(text) for text in texts])
        wrong = (values != 0) & (values != 1)
        where.refuse(wrong, f"have another value than 0 or 1 in the column {name}", texts)
        columns.append(values)
    return np.stack(columns, axis=1).astype(np.float32)


def _read_numbers(
    cells: Sequence[Sequence[str]], names: Sequence[str], where: Location
) -> np.ndarray:
    columns = []
    for name, texts in zip(names, cells):
        values = np.array([parse_number(text) for text in texts]).astype(np.float32)
        where.refuse(~np.isfinite(values), f"have no finite number in the column {name}", texts)
        columns.append(values)
    return np.stack(columns, axis=1)


def parse_number(text: str) -> float:
    """Return the number in a text; NaN if it has none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
