"""ImageNet as the 2021 reference stored it: root/{train,val}.zip, each with a {train,val}_map.txt.

A line of the map: `train.zip@n01440764/n01440764_10026.JPEG`, a TAB, the class as an integer.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.classes import class_number, numbered_classes
from vil.data.dataset import ImageDataset
from vil.data.datasets.folder import Folder, layout
from vil.data.formats.archive import ZipArchive
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".tiff", ".bmp", ".png")
LAYOUT = """
or, as archives:
{root}
├── train.zip            any folders inside, or none
├── train_map.txt        a line per picture: train.zip@cat/1.jpg<TAB>0
├── val.zip
└── val_map.txt"""


class ZipMap(ImageDataset):
    """The pictures of the zip that the map names, in the order of the zip's directory."""

    def __init__(
        self,
        root: str | Path,
        split: str,
        transform: Callable | None = None,
        *,
        num_classes: int | None = None,
    ):
        """Without num_classes the largest number of train's map decides (without one, the split's).

        DataError for a file that is missing or broken and for a class outside of the classes.
        """
        super().__init__(split, transform)
        root = Path(root)
        zip_file, map_file = root / f"{split}.zip", root / f"{split}_map.txt"
        refuse_half(zip_file, map_file)
        if num_classes is None and split != "train" and (root / "train_map.txt").exists():
            num_classes = count(read_map(root / "train_map.txt"))
        labels = read_map(map_file, num_classes)
        self.classes = numbered_classes(num_classes or count(labels))
        self.archive = ZipArchive(zip_file, lambda name, size: is_sample(name, size, labels))
        self.targets = np.array(
            [labels.pop(os.fsdecode(name)) for name in self.archive.names], np.int64
        )
        self.tell_absent(zip_file, map_file, labels)

    def tell_absent(self, zip_file: Path, map_file: Path, absent: dict[str, int]) -> None:
        """One warning for lines without a picture; DataError when no line has one."""
        if not len(self.targets):
            raise DataError(f"{map_file} names no picture of {zip_file} ({' '.join(EXTENSIONS)})")
        if absent:
            first = next(iter(absent))
            logger.warning(
                "%s names %d pictures that are not in %s, the first: %s",
                map_file,
                len(absent),
                zip_file,
                first,
            )

    def image(self, index: int) -> Image.Image:
        """The decoded member. Raises UnreadableImage."""
        return self.archive.image(index)

    def sample_name(self, index: int) -> str:
        """As in the map: train.zip@cat/1.jpg."""
        return self.archive.name(index)


def is_sample(name: str, size: int, labels: dict[str, int]) -> bool:
    """Whether a member is a picture that the map names."""
    return (
        name in labels
        and size > 0
        and not name.startswith(".")
        and name.lower().endswith(EXTENSIONS)
    )


def refuse_half(zip_file: Path, map_file: Path) -> None:
    """DataError, in one line, when one of the two is not there."""
    for there, missing in ((zip_file, map_file), (map_file, zip_file)):
        if not missing.is_file():
            raise DataError(
                f"there is no {missing}, which {there} needs: the map has a line "
                f"'{zip_file.name}@<member><TAB><class number>' for each picture of the zip"
            )


def read_map(file: Path, limit: int | None = None) -> dict[str, int]:
    """Member -> class. DataError, with file and line, for what is not a map."""
    labels = {}
    for number, (member, text) in map_lines(file):
        label = class_number(text, limit, file, number)
        if labels.setdefault(member, label) != label:
            raise DataError(
                f"{file}, line {number}: {member} is class {label}, "
                f"and was class {labels[member]} before"
            )
    if not labels:
        raise DataError(f"{file} is empty")
    return labels


def map_lines(file: Path) -> Iterator[tuple[int, tuple[str, str]]]:
    """Line numbers from 1 with (member, class text); further fields are not read."""
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            fields = [field for field in line.rstrip("\r\n").split("\t") if field]
            if not line.strip():
                continue
            if len(fields) < 2 or "@" not in fields[0]:
                raise DataError(
                    f"{file}, line {number}: expected '<zip>@<member><TAB><class>', "
                    f"given {line.strip()[:100]!r}"
                )
            yield number, (fields[0].split("@", 1)[1].removeprefix("/"), fields[1])


def count(labels: dict[str, int]) -> int:
    """Classes that the labels need."""
    return max(labels.values()) + 1


def imagenet(
    root: str | Path,
    split: str,
    transform: Callable | None = None,
    *,
    num_classes: int | None = None,
) -> ImageDataset:
    """Zip and map, else class folders. One of the two alone is an error unless there are folders.

    ValueError when the folders are not num_classes; DataError, with both layouts, for neither.
    """
    root = Path(root)
    folder, pair = root / split, (root / f"{split}.zip", root / f"{split}_map.txt")
    there = [file.is_file() for file in pair]
    if all(there) or (any(there) and not folder.is_dir()):
        return ZipMap(root, split, transform, num_classes=num_classes)
    if not folder.is_dir():
        problem = f"there is no {pair[0]} and no folder {folder}"
        raise DataError(layout(root, problem) + LAYOUT.format(root=root))
    dataset = Folder(root, split, transform)
    if num_classes not in (None, len(dataset.classes)):
        raise ValueError(f"num_classes is {num_classes}, {root} has {len(dataset.classes)} folders")
    return dataset
