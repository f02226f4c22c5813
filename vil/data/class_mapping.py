"""Which class of a model stands for which class of a dataset that was labelled otherwise.

A JSON file {"<class of the model>": "<name>(...)"}: the text up to the last "(" is looked for among
the names of the dataset, where it may be followed by "(" and anything.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


def read_class_mapping(
    path: str | Path, num_classes: int, dataset_classes: Sequence[str]
) -> Tensor:
    """links (num_classes, dataset's classes) bool: many to many.

    One warning for dataset classes that nothing stands for. DataError when the file is not such a
    map, names a class that the model has not, or links nothing.
    """
    links = torch.zeros(num_classes, len(dataset_classes), dtype=torch.bool)
    columns = by_name(dataset_classes)
    for number, text in read_entries(path, num_classes).items():
        links[number, columns.get(text.rsplit("(", 1)[0], [])] = True
    alone = [name for name, linked in zip(dataset_classes, links.any(0).tolist()) if not linked]
    if len(alone) == len(dataset_classes):
        raise DataError(f"{path} links no class of the model to one of {', '.join(alone[:5])}, ...")
    if alone:
        logger.warning(
            "%s: no class of the model stands for %d of %d classes, whose images count as wrong; "
            "the first: %s",
            path,
            len(alone),
            len(dataset_classes),
            alone[0],
        )
    return links


def by_name(classes: Sequence[str]) -> dict[str, list[int]]:
    """The classes that a name means: those called so, or so before one of their "("."""
    columns = {}
    for column, known in enumerate(classes):
        for end in [len(known), *(place for place, sign in enumerate(known) if sign == "(")]:
            columns.setdefault(known[:end], []).append(column)
    return columns


def read_entries(path: str | Path, num_classes: int) -> dict[int, str]:
    """Class of the model -> the text beside it. DataError."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no target map {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f'{path} must be a JSON object {{"0": "name(...)", ...}}')
    for key, text in table.items():
        if not (key.isdecimal() and int(key) < num_classes and isinstance(text, str)):
            raise DataError(
                f"{path}: {key!r}: {text!r} must be a class of the model (0..{num_classes - 1}) "
                "and a name"
            )
    return {int(key): text for key, text in table.items()}
