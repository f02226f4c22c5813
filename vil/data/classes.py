"""Class names and class numbers of a split, and the map from a model's classes to them.

Datasets are of two kinds. Some have named classes (folders), which the training split numbers.
Others have plain numbers for labels, and only the number of classes must be known.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

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


def read_class_mapping(
    path: str | Path, num_classes: int, dataset_classes: Sequence[str]
) -> Tensor:
    """Map the classes of a model to those of a dataset that is labeled differently
    (DATA.TARGETMAP): a many-to-many mapping (num_classes, dataset's classes) bool.

    The JSON file {"<class of the model>": "<name>(...)"} gives a class name of the dataset for each
    class of the model. The text up to the last "(" is compared with the dataset's names, each of
    which may also be followed by "(" and anything. Warns once about dataset classes that no class
    of the model maps to. Raises DataError if the file is invalid, contains a class that the model
    does not have, or maps no class.
    """
    mapping = torch.zeros(num_classes, len(dataset_classes), dtype=torch.bool)
    columns = columns_by_name(dataset_classes)
    for number, text in read_entries(path, num_classes).items():
        mapping[number, columns.get(text.rsplit("(", 1)[0], [])] = True
    unmapped = [name for name, used in zip(dataset_classes, mapping.any(0).tolist()) if not used]
    if len(unmapped) == len(dataset_classes):
        names = ", ".join(unmapped[:5])
        raise DataError(f"{path} maps no class of the model to one of {names}, ...")
    if unmapped:
        count = f"{len(unmapped)} of {len(dataset_classes)} classes"
        text = "%s: no class of the model maps to %s, whose images count as wrong; the first: %s"
        logger.warning(text, path, count, unmapped[0])
    return mapping


def columns_by_name(classes: Sequence[str]) -> dict[str, list[int]]:
    """Class numbers by name, where "a (b)" is found by its full name and by the text before "("."""
    columns = {}
    for column, name in enumerate(classes):
        for end in [len(name), *(i for i, character in enumerate(name) if character == "(")]:
            columns.setdefault(name[:end], []).append(column)
    return columns


def read_entries(path: str | Path, num_classes: int) -> dict[int, str]:
    """{class of the model: text}. Raises DataError for an invalid file."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no class mapping {path} (DATA.TARGETMAP)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f'{path} must be a JSON object {{"0": "name(...)", ...}}')
    for key, text in table.items():
        if not (key.isdecimal() and int(key) < num_classes and isinstance(text, str)):
            allowed = f"a class of the model (0..{num_classes - 1}) and a name"
            raise DataError(f"{path}: {key!r}: {text!r} must be {allowed}")
    return {int(key): text for key, text in table.items()}
