"""Class names and class numbers of a split.

Datasets are of two kinds. Some have named classes (folders), which the training split numbers.
Others have plain numbers for labels, and only the number of classes must be known.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


def classes_of_split(
    split: str, names: list[str], train: Path, read: Callable[[Path], list[str]]
) -> list[str]:
    """The class list of a split that contains the classes `names`, sorted.

    It is the training split's list, `read(train)`, which must contain all `names`. If `train` does
    not exist (evaluation only), the validation split's own names are used, with a warning.
    """
    if split == "train":
        return names
    if not train.exists():
        logger.warning("no %s: the classes are those of val", train)
        return names
    classes = read(train)
    if unknown := sorted(set(names) - set(classes)):
        path = train.with_name(train.name.replace("train", "val"))
        raise DataError(f"{path} has classes that train does not have: {', '.join(unknown)}")
    return classes


def parse_class(
    text: str, num_classes: int | None, file: Path, line: int, expected: str = "an integer"
) -> int:
    """The class number in a line of a file.

    Raises DataError, with what was `expected` in words, unless it is an integer in 0..num_classes-1
    (num_classes None: any number from 0).
    """
    try:
        label = int(text)
    except ValueError:
        problem = f"the class must be {expected}, not {text!r}"
        raise DataError(f"{file}, line {line}: {problem}") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        allowed = "from 0 up" if num_classes is None else f"0..{num_classes - 1}"
        raise DataError(f"{file}, line {line}: class {label} is outside of the classes ({allowed})")
    return label
