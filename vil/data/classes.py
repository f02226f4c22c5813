"""Class lists of datasets and of runs: read and check them, and match them to a model's classes.

The sorted class names of the training split define the class numbers. A dataset with integer labels
has no class names.
"""

import json
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vil.utils.errors import DataError
from vil.utils.safe_files import regular_file

logger = logging.getLogger(__name__)

is_integer = re.compile(r"[+-]?\d{1,4000}").fullmatch  # `int` refuses more than 4300 digits


def normalize_name(name: str) -> str:
    """Return a name in the composed Unicode form, NFC.

    The same name may occur in two forms that look alike, for example if one of them comes from an
    archive that was written on macOS.
    """
    return unicodedata.normalize("NFC", name)


def list_classes(names: Iterable[str], source: Path) -> list[str]:
    """Return the class list for the names in `source`: sorted, in the form of `normalize_name`.

    Names that differ only in their Unicode form are one class, of which a warning is logged. The
    names are sorted as they are written in `source`.
    """
    written: dict[str, str] = {}
    for name in sorted(set(names)):
        if written.setdefault(normalize_name(name), name) != name:
            _warn_unicode_forms(source, normalize_name(name))
    return list(written)


@cache  # once per process, because each split reads the classes of the training split
def _warn_unicode_forms(source: Path, name: str) -> None:
    text = "%s has the class %s in two Unicode forms (NFC and NFD): both are one class"
    logger.warning(text, source, name)


def classes_of_split(
    split: str, names: list[str], train: Path, read: Callable[[Path], list[str]]
) -> list[str]:
    """Return the class list to use for a split: the classes of the training split, if it exists.

    Args:
        names: the classes that occur in this split; used if `train` does not exist.
        train: path of the training split, a file or folder.
        read: function that reads the class list of a split from its path.

    Returns names in the form of `normalize_name`. Raises DataError if `names` has a class that the
    training split lacks.
    """
    path = train.with_name(train.name.replace("train", split))
    if split != "train" and not train.exists():
        logger.warning("%s does not exist: the classes are taken from the %s split", train, split)
    if split == "train" or not train.exists():
        return list_classes(names, path)
    classes = list_classes(read(train), train)
    if unknown := sorted(set(map(normalize_name, names)) - set(classes)):
        raise DataError(
            f"{path} has classes that are missing from the training split: {', '.join(unknown)}"
        )
    return classes


def match_classes(
    dataset: Any, learned: Sequence[str], name: str, *, by_position: bool = False
) -> None:
    """Reorder a dataset's classes in place so that they match the classes of the model.

    Args:
        learned: the class names of the model.
        name: the dataset's name in messages.
        by_position: match classes by their numbers, which does not change the dataset.

    Names that `respell` finds equal match, and the dataset gets the model's spelling. If one side
    has no class names and the names of the other are not numbers, classes are matched by number,
    with a warning. Raises DataError if the sets of names differ, or if two classes have the same
    name and need reordering.
    """
    if list(dataset.classes) == list(learned) or by_position:
        return
    here, learned = respell(dataset.classes, learned), list(learned)
    dataset.classes = here
    if here == learned or (is_unnamed(here) and is_unnamed(learned)):
        return
    if sorted(here) == sorted(learned) and len(set(here)) == len(here):
        logger.warning(
            "%s has the model's classes in another order: they are matched by name", name
        )
        dataset.reorder_classes(learned)
        return
    is_numbered = is_unnamed(here) or is_unnamed(learned)
    if not learned or (is_numbered and not all(map(is_integer, here + learned))):
        side = name if is_unnamed(here) else "the model"
        text = "%s has no class names: the classes of %s are matched by position"
        logger.warning(text, side, name)
        return
    missing, added = sorted(set(learned) - set(here)), sorted(set(here) - set(learned))
    lists = {"missing": missing, "added": added}
    problem = "; ".join(f"{word}: {', '.join(names[:5])}" for word, names in lists.items() if names)
    remedy = "to match classes by number, set DATA.CLASSES to by_position"
    if problem:
        raise DataError(f"{name} has other classes than the model ({problem}): {remedy}")
    raise DataError(
        f"two classes of {name} have the same name, so they cannot be matched by name: {remedy}"
    )


def respell(names: Sequence[str], learned: Sequence[str]) -> list[str]:
    """Return `names` in the spelling of `learned` if they differ only in their Unicode form, or as
    numbers only in leading zeros. If a name is not in `learned`, all are returned as they are."""
    for form in (normalize_name, _without_zeros):
        spelling = {form(name): name for name in learned}
        result = [spelling.get(form(name), "") for name in names]
        unique = len(spelling) == len(learned) and len(set(result)) == len(result)
        if unique and set(result) <= set(learned):
            return result
    return list(names)


def _without_zeros(name: str) -> str:
    return str(int(name)) if is_integer(name) else normalize_name(name)


def add_learned_classes(dataset: Any, learned: Sequence[str], name: str) -> None:
    """Add to a dataset, in place, the model's classes that it lacks. They have no images.

    Does nothing for a regression dataset (target_type "numbers"), or if the dataset has a class
    that the model lacks. learned: the model's classes. name: the dataset's name.
    """
    dataset.classes = respell(dataset.classes, learned)
    here = set(dataset.classes)
    missing = [each for each in learned if each not in here]
    is_subset = here <= set(learned) and len(set(learned)) == len(learned)
    if missing and is_subset and dataset.target_type != "numbers":
        text = "%s: %d of %d classes have no images, such as %s"
        logger.warning(text, name, len(missing), len(learned), missing[0])
        dataset.reorder_classes(learned)


def check_class_names(names: Sequence[str], dataset: str) -> None:
    """Raise DataError if a class name has a line break, because classes.txt has a line per class.
    dataset: name of the dataset for the message."""
    if broken := [name for name in names if "\n" in name or "\r" in name]:
        raise DataError(f"{dataset}: the class name {broken[0]!r} has a line break: rename it")


def read_class_names(file: Path) -> list[str]:
    """Read the class names in a run's classes.txt. Returns [] if there is no such file."""
    if not file.is_file():
        return []
    return file.read_text("utf-8", "surrogateescape").split("\n")[:-1]


def format_class_names(names: Sequence[str]) -> str:
    """Return the contents of a run's classes.txt, see `read_class_names`."""
    return "".join(f"{name}\n" for name in names)


def is_unnamed(names: Sequence[str]) -> bool:
    """Return whether the class names are just "0", "1", "2", ...; True for an empty list."""
    return list(names) == [str(number) for number in range(len(names))]


def parse_class(
    text: str, num_classes: int | None, file: Path, line: int, expected: str = "an integer"
) -> int:
    """Parse a class number from a line of a file.

    Raises DataError unless the text is an integer in 0..num_classes-1, or at least 0 if num_classes
    is None. file, line, expected: the location and a description of valid texts, for the message.
    """
    try:
        label = int(text)
    except ValueError:
        problem = f"the class must be {expected}, not {text!r}"
        raise DataError(f"{file}, line {line}: {problem}") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        allowed = "from 0 up" if num_classes is None else f"0..{num_classes - 1}"
        raise DataError(f"{file}, line {line}: class {label} is out of range ({allowed})")
    return label


def read_class_mapping(
    path: str | Path, num_classes: int, dataset_classes: Sequence[str]
) -> Tensor:
    """Read the mapping from model classes to dataset classes (DATA.TARGETMAP).

    The JSON file maps class numbers of the model to texts, such as {"3": "cat(n02123045)"}. The
    text before the last "(", here "cat", selects the dataset classes called "cat" and those whose
    name starts with "cat(".

    Returns a bool matrix (num_classes, number of dataset classes). Warns of dataset classes that
    are not mapped. Raises DataError if the file is invalid, has a class number that the model
    lacks, or selects no dataset class.
    """
    mapping = torch.zeros(num_classes, len(dataset_classes), dtype=torch.bool)
    columns = columns_by_name(dataset_classes)
    for number, text in read_entries(path, num_classes).items():
        mapping[number, columns.get(normalize_name(text.rsplit("(", 1)[0]), [])] = True
    unmapped = [name for name, used in zip(dataset_classes, mapping.any(0).tolist()) if not used]
    if len(unmapped) == len(dataset_classes):
        raise DataError(
            f"no text in {path} names a class of the dataset: use its class names, such as "
            f"{', '.join(unmapped[:5])}"
        )
    if unmapped:
        count = f"{len(unmapped)} of {len(dataset_classes)} classes"
        text = "%s: no class of the model maps to %s, so their images always count as errors; "
        text += "the first: %s"
        logger.warning(text, path, count, unmapped[0])
    return mapping


def columns_by_name(classes: Sequence[str]) -> dict[str, list[int]]:
    """Return {name: class numbers that the name selects}. A class called "a(b)" is listed under
    "a(b)" and under "a"."""
    columns = {}
    for column, name in enumerate(map(normalize_name, classes)):
        for end in [len(name), *(i for i, character in enumerate(name) if character == "(")]:
            columns.setdefault(name[:end], []).append(column)
    return columns


def read_entries(path: str | Path, num_classes: int) -> dict[int, str]:
    """Read the JSON file of a class mapping. Returns {class number of the model: text}, where the
    text names classes of the dataset. Raises DataError if the file is invalid."""
    try:
        table = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no class mapping {path}: check DATA.TARGETMAP") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f'{path} must contain a JSON object such as {{"0": "name(...)", ...}}')
    for key, text in table.items():
        if not (key.isdecimal() and int(key) < num_classes and isinstance(text, str)):
            raise DataError(
                f"{path}: each entry must map a class number of the model (0..{num_classes - 1}) "
                f"to a text, but {key!r} maps to {text!r}"
            )
    return {int(key): text for key, text in table.items()}
