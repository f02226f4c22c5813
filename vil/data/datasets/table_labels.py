"""Convert the label texts of a table or another dataset to targets. A row has one class, several
labels, or several numbers.

Shapes: R rows, K labels or numbers.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vil.data.classes import is_integer, list_classes, normalize_name
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)

IF_NAMES = "; if every text is a class name, set DATA.KWARGS.text_labels True"
INDICATORS = {"0", "1", "False", "True"}
SURE_SEPARATORS = (",", ";", "|", "\t")  # hardly in the name of a label
OTHER_SEPARATORS = ("/", "+", "&", " ")  # separators only if splitting leaves fewer labels


class Location(NamedTuple):
    """The file or folder of some rows, and the position of each row, for error messages.

    The messages have the form "<path>: 2 of 9 <noun> ...; the first in <unit> <item of lines>".
    lines: for each row, its number in the table, or its name if the rows are not from a table.
    unit: "line", "row" or "sample". noun: "rows" or "samples".
    """

    path: Path
    unit: str
    lines: Sequence[int | str]
    noun: str = "rows"

    def refuse(
        self, wrong: Sequence[bool] | np.ndarray, problem: str, texts: Sequence[str] | np.ndarray
    ) -> None:
        """Raise DataError if any row is wrong. The message counts these rows and quotes the first.

        wrong: (rows,) bool. problem: the end of a sentence about the wrong rows, such as "have no
        path". texts: for each row, the text that the message quotes.
        """
        rows = np.flatnonzero(wrong).tolist()
        if rows:
            count = f"{len(rows)} of {len(self.lines)} {self.noun}"
            first = f"{self.unit} {self.lines[rows[0]]}: {texts[rows[0]][:100]!r}"
            raise DataError(f"{self.path}: {count} {problem}; the first in {first}")


def read_targets(
    cells: Sequence[Sequence[Any]],
    names: Sequence[str],
    target_type: str,
    where: Location,
    is_train: np.ndarray,
    *,
    separator: str,
    text_labels: bool,
    name: str,
    classes: Sequence[str] = (),
) -> tuple[list[str], np.ndarray]:
    """Return the classes and the targets of all rows. `ImageDataset` describes both.

    Args:
        cells: for each label column, the cells of all rows: texts or, only if `names` is empty,
            lists of texts.
        names: names of the label columns if the user listed them, otherwise [].
        is_train: (rows,) bool.
        separator, text_labels: see `Table`.
        name: name of the label column if `names` is empty.
        classes: names of the classes. If empty, the labels of the training rows are the classes.

    Raises DataError for an invalid label.
    """
    for column_name, column in zip(names, cells):
        refuse_lists(column, column_name, where)
    if any(isinstance(cell, list) for cell in cells[0]):
        items = [cell if isinstance(cell, list) else [cell] for cell in cells[0]]
        own = dict(text_labels=text_labels, name=name, classes=classes)
        return read_lists(items, target_type, where, is_train, **own)
    if target_type == "numbers":
        return list(names) or [name], _read_numbers(cells, names or [name], where)
    if target_type == "labels" and names:
        return list(names), _read_indicators(cells, names, where)
    if names:
        raise DataError(
            f"{where.path}: DATA.KWARGS.label_columns is for several labels or numbers per image "
            "(TASK multilabel or regression): set label_column instead"
        )
    texts = [text.strip() for text in cells[0]]
    sets = [[label.strip() for label in text.split(separator) if label.strip()] for text in texts]
    if target_type == "class" and not text_labels:
        problem = (
            f"have several labels, separated by {separator} (set TASK to multilabel?){IF_NAMES}"
        )
        where.refuse([len(labels) > 1 for labels in sets], problem, texts)
    elif target_type == "labels" and not text_labels:
        warn_joined(
            sets, where.path, f"no cell has the separator {separator!r}", "DATA.KWARGS.separator"
        )
    return _read_labels(sets, texts, target_type, where, is_train, text_labels, classes)


def refuse_lists(column: Sequence[Any], name: str, where: Location) -> None:
    """Raise DataError if a cell of the column `name` is a list."""
    problem = f"have a list in the column {name}: write a text or a number"
    where.refuse([isinstance(cell, list) for cell in column], problem, column)


def _read_labels(
    sets: list[list[str]],
    texts: list[str],
    target_type: str,
    where: Location,
    is_train: np.ndarray,
    text_labels: bool,
    classes: Sequence[str],
) -> tuple[list[str], np.ndarray]:
    """Return the classes and the targets of rows with one class or several labels each.

    sets: labels of each row. texts: for each row, the text that a message quotes. If target_type is
    "class", this is the class. The other arguments are those of `read_targets`.
    """
    classes = [normalize_name(name) for name in classes]
    if repeated := [name for name, count in Counter(classes).items() if count > 1]:
        problem = "is twice in the list of classes, maybe in two Unicode forms (NFC and NFD)"
        raise DataError(f"{where.path}: {repeated[0]} {problem}: rename one of them")
    labels = [[text] for text in texts] if target_type == "class" else sets
    broken = [any("\n" in label or "\r" in label for label in of_row) for of_row in labels]
    where.refuse(broken, "have a label with a line break", texts)
    missing = ("",) if text_labels else ("", "nan")
    problem = "have no label"
    if target_type == "labels":
        problem = "have a missing label (leave the cell or list of an image without labels empty)"
    incomplete = [any(label.lower() in missing for label in of_row) for of_row in labels]
    where.refuse(incomplete, problem, texts)
    if not (text_labels or classes):
        _refuse_mixed(sets, texts, where)
        if target_type == "labels":
            _refuse_indicators(sets, texts, where)
    if target_type == "labels":
        return _read_sets(sets, texts, where, is_train, classes)
    return _read_classes(texts, where, is_train, classes)


def read_lists(
    items: Sequence[Sequence[str]],
    target_type: str,
    where: Location,
    is_train: np.ndarray,
    *,
    text_labels: bool,
    name: str,
    classes: Sequence[str] = (),
) -> tuple[list[str], np.ndarray]:
    """Return the classes and the targets of rows that each have a list of texts.

    items: the texts of each row: one if target_type is "class", K if it is "numbers", any number if
    it is "labels". A missing value is "". name: for "numbers", the name of the number. K > 1
    numbers are named <name>_0, <name>_1, ... The other arguments and the result are those of
    `read_targets`.
    """
    shown = [", ".join(texts).strip() for texts in items]
    if target_type == "numbers":
        size = len(items[0])
        problem = f"have no numbers, or not as many as the first ({size})"
        where.refuse([len(texts) != size or not size for texts in items], problem, shown)
        names = [f"{name}_{number}" for number in range(size)] if size > 1 else [name]
        return names, _read_numbers(list(zip(*items)), names, where)
    if target_type == "class":
        problem = "have several labels (set TASK to multilabel?)"
        where.refuse([len(texts) > 1 for texts in items], problem, shown)
    sets = [[text.strip() for text in texts] for texts in items]
    if target_type == "labels" and not text_labels:
        warn_joined(sets, where.path, "no list of labels has two items")
    return _read_labels(sets, shown, target_type, where, is_train, text_labels, classes)


def warn_joined(sets: Sequence[Sequence[str]], path: Path, why: str, key: str = "") -> None:
    """Log a warning if no row has several labels, but the labels seem to be several in one text.

    sets: labels of each row. path: of the table or dataset. why: reason why each text is one label.
    key: config key of the separator; "" if a row has a list of labels.
    """
    texts = {text for labels in sets for text in labels if text}
    if any(len(labels) > 1 for labels in sets):
        return
    remedy = f"set {key} to {{!r}}" if key else "split the labels at the separator {!r}"
    if texts and all((text[0], text[-1]) in (("[", "]"), ("{", "}")) for text in texts):
        remedy = "write the labels with a separator between them instead" + (key and f" ({key})")
        _warn_joined(path, why, "are lists or JSON objects", min(texts), remedy)
        return
    for separator in (*SURE_SEPARATORS, *OTHER_SEPARATORS):
        joined = sorted(text for text in texts if separator in text)
        split = {part.strip() for text in texts for part in text.split(separator)}
        if joined and (separator in SURE_SEPARATORS or len(split) < len(texts)):
            problem = f"have another separator, {separator!r}"
            _warn_joined(path, why, problem, joined[0], remedy.format(separator))
            return


@cache  # once per process, because each split reads the labels of the training split
def _warn_joined(path: Path, why: str, problem: str, example: str, remedy: str) -> None:
    text = "%s: %s, so each text is one label, but texts %s, such as %r: %s"
    logger.warning(text, path, why, problem, example[:100], remedy)


def read_weights(texts: Sequence[str], where: Location) -> np.ndarray:
    """Parse the sample weights of R rows. Returns (R,) float32. Raises DataError if a weight is not
    a number or is negative."""
    weights = np.array([parse_number(text) for text in texts], np.float64)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    where.refuse(wrong, "have a weight that is not a number of at least 0", texts)
    return weights.astype(np.float32)


def _refuse_mixed(sets: list[list[str]], texts: list[str], where: Location) -> None:
    """Raise DataError unless all labels are texts or all are integers. sets: labels of each row.
    texts: for each row, the text that the message quotes."""
    kinds = [{_kind(label) for label in labels} for labels in sets]
    counts = Counter(itertools.chain.from_iterable(kinds))
    if not counts or set(counts) in ({"text"}, {"integer"}):
        return
    rarest = min(counts, key=lambda kind: (counts[kind], kind))
    problem = "have labels that are numbers with a fraction (set TASK to regression?)"
    if len(counts) > 1:
        others = " and ".join(sorted({*counts} - {rarest}))
        problem = f"have {rarest} labels, and the others have {others} labels"
    where.refuse([rarest in of_row for of_row in kinds], problem + IF_NAMES, texts)


def _refuse_indicators(sets: list[list[str]], texts: list[str], where: Location) -> None:
    """Raise DataError if the labels of the rows are 0 or 1 for each label, instead of names. sets:
    labels of each row. texts: for each row, the text that the message quotes."""
    sizes = {len(labels) for labels in sets if labels}
    is_repeated = any(len(set(labels)) < len(labels) for labels in sets)
    if INDICATORS.issuperset(itertools.chain.from_iterable(sets)) and (
        is_repeated or (len(sizes) == 1 and sizes != {1})
    ):
        problem = (
            "have lists of 0 and 1 instead of label names: write the names, or in a table one "
            "column of 0 and 1 per label, and list these columns in DATA.KWARGS.label_columns"
        )
        where.refuse([bool(labels) for labels in sets], problem, texts)


def _read_classes(
    texts: list[str], where: Location, is_train: np.ndarray, classes: Sequence[str]
) -> tuple[list[str], np.ndarray]:
    unknown = "is not in the list of classes" if classes else "no training image has"
    if not classes:
        classes = _list_labels((text for text, train in zip(texts, is_train) if train), where.path)
    numbers = {text: number for number, text in enumerate(classes)}
    texts = [normalize_name(text) for text in texts]
    where.refuse([text not in numbers for text in texts], f"have a class that {unknown}", texts)
    return list(classes), np.array([numbers[text] for text in texts], np.int64)


def _list_labels(used: Iterable[str], path: Path) -> list[str]:
    """Return the classes for the labels that training rows use: sorted, by value if all are
    integers. Logs a warning if two classes are the same number, such as 01 and 1."""
    classes = list_classes(used, path)
    if all(map(is_integer, classes)):
        classes.sort(key=int)
        pairs = itertools.pairwise(classes)
        if same := [pair for pair in pairs if int(pair[0]) == int(pair[1])]:
            _warn_same_number(path, *same[0])
    return classes


@cache  # once per process, because each split reads the labels of the training split
def _warn_same_number(path: Path, one: str, other: str) -> None:
    text = "%s: %s and %s are two classes: if they are the same, write them the same way"
    logger.warning(text, path, one, other)


def _kind(text: str) -> str:
    if is_integer(text):
        return "integer"
    return "text" if math.isnan(parse_number(text)) else "fractional"


def _read_sets(
    sets: list[list[str]],
    texts: list[str],
    where: Location,
    is_train: np.ndarray,
    classes: Sequence[str],
) -> tuple[list[str], np.ndarray]:
    unknown = "is not in the list of classes" if classes else "no training image has"
    if not classes:
        used = (labels for labels, train in zip(sets, is_train) if train)
        classes = _list_labels(itertools.chain.from_iterable(used), where.path)
    if not classes:
        raise DataError(f"{where.path}: no training image has a label")
    numbers = {text: number for number, text in enumerate(classes)}
    sets = [[normalize_name(label) for label in labels] for labels in sets]
    wrong = [any(label not in numbers for label in labels) for labels in sets]
    where.refuse(wrong, f"have a label that {unknown}", texts)
    targets = np.zeros((len(texts), len(classes)), np.float32)
    for row, labels in enumerate(sets):
        targets[row, [numbers[label] for label in labels]] = 1
    return list(classes), targets


def _read_indicators(
    cells: Sequence[Sequence[str]], names: Sequence[str], where: Location
) -> np.ndarray:
    columns = []
    for name, texts in zip(names, cells):
        values = np.array([parse_number(text) for text in texts])
        wrong = (values != 0) & (values != 1)
        where.refuse(wrong, f"have a value other than 0 or 1 in the column {name}", texts)
        columns.append(values)
    return np.stack(columns, axis=1).astype(np.float32)


def _read_numbers(
    cells: Sequence[Sequence[str]], names: Sequence[str], where: Location
) -> np.ndarray:
    columns = []
    for name, texts in zip(names, cells):
        values = np.array([parse_number(text) for text in texts], np.float64)
        wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
        where.refuse(wrong, f"have no finite number in the column {name}", texts)
        columns.append(values)
    return np.stack(columns, axis=1)


def parse_number(text: str) -> float:
    """Convert a text to a float. Returns NaN if the text is not a number."""
    if "_" in text:  # Python reads 1_000 as 1000
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan
