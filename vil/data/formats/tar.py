"""A folder dataset in two archives: root/{train,val}.tar with members <class>/<image>."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.classes import classes_of_split
from vil.data.dataset import ImageDataset
from vil.data.datasets.folder import EXTENSIONS
from vil.data.formats.archive import TarArchive
from vil.utils.errors import DataError

LAYOUT = """{problem}. Expected:
{root}
├── train.tar            not compressed; `tar -cf train.tar -C train .` makes it from a folder
│   ├── cat/1.jpg        {extensions}
│   ├── cat/2.png
│   └── dog/3.jpg
└── val.tar              the same classes, other images"""


class Tar(ImageDataset):
    """Classes and the order of samples are those of `Folder` on the extracted tars.

    Names may have a leading ./ or a folder around all classes.
    """

    def __init__(self, root: str | Path, split: str, transform: Callable | None = None):
        super().__init__(split, transform)
        root = Path(root)
        self.archive, folders = open_tar(root, split)
        names = sorted(set(folders))
        self.classes = classes_of_split(split, names, root / "train.tar", train_classes)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.targets = np.array([numbers[folder] for folder in folders], np.int64)

    def image(self, index: int) -> Image.Image:
        """The decoded member. Raises UnreadableImage."""
        return self.archive.image(index)

    def sample_name(self, index: int) -> str:
        """train.tar@cat/1.jpg."""
        return self.archive.name(index)


def open_tar(root: Path, split: str) -> tuple[TarArchive, list[str]]:
    """The images sorted by class folder and file name, and the folder of each. Raises DataError."""
    file = root / f"{split}.tar"
    if not file.is_file():
        raise DataError(layout(root, f"there is no {file}"))
    archive = TarArchive(file, is_image)
    parts = [os.fsdecode(name).split("/") for name in archive.names]
    if parts and all(len(p) > 2 and p[0] == parts[0][0] for p in parts):
        parts = [p[1:] for p in parts]
    if not parts:
        raise DataError(layout(root, f"{file} has no images"))
    for index, path in enumerate(parts):
        if len(path) != 2:
            raise DataError(layout(root, f"{archive.name(index)} is not <class>/<image>"))
    order = sorted(range(len(parts)), key=parts.__getitem__)
    archive.keep(np.array(order))
    return archive, [parts[i][0] for i in order]


def train_classes(file: Path) -> list[str]:
    """The class folders of train.tar."""
    return sorted(set(open_tar(file.parent, "train")[1]))


def is_image(name: str, size: int) -> bool:
    """Whether a member is an image, by its name. Hidden files and folders are not."""
    hidden = any(part.startswith(".") for part in name.split("/") if part != "..")
    return name.lower().endswith(EXTENSIONS) and not hidden


def layout(root: Path, problem: str) -> str:
    """The problem, followed by the expected content."""
    return LAYOUT.format(problem=problem, root=root, extensions=" ".join(EXTENSIONS))
