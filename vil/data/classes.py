"""What the classes of a split are called, and which number a label has.

Two sorts of datasets: classes with names (folders), where training decides the numbers; and labels
that are numbers already, where the only question is how many classes there are.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


def trained_classes(
    split: str, found: list[str], trained: Path, read: Callable[[Path], list[str]]
) -> list[str]:
    """The class list of a split in which the class names `found` occur, sorted.

    They are train's own, which `read(trained)` gives, and every one found must be among them.
    Without train (somebody who only evaluates) val's own are the classes, with a warning.
    """
    if split == "train":
        return found
    if not trained.exists():
        logger.warning("no %s: the classes are those of val", trained)
        return found
    known = read(trained)
    if unknown := sorted(set(found) - set(known)):
        place = trained.with_name(trained.name.replace("train", "val"))
        raise DataError(f"{place} has classes that train has not: {', '.join(unknown)}")
    return known


def class_number(
    text: str, limit: int | None, file: Path, line: int, kind: str = "an integer"
) -> int:
    """The label that stands in a line; DataError unless it is an integer of 0..limit-1.

    `kind` says in the error what else the line may hold.
    """
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{file}, line {line}: the class must be {kind}, not {text!r}") from None
    if label < 0 or (limit is not None and label >= limit):
        allowed = "from 0 up" if limit is None else f"0..{limit - 1}"
        raise DataError(f"{file}, line {line}: class {label} is outside of the classes ({allowed})")
    return label


def numbered_classes(count: int) -> list[str]:
    """Names of classes that have none."""
    return [str(number) for number in range(count)]
