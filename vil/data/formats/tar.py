"""Datasets of class folders in tar files: root/{train,val}.tar with members <class>/<image>."""

import os
from functools import partial
from pathlib import Path

import numpy as np

from vil.data.classes import classes_of_split, normalize_name
from vil.data.dataset import Root, Transform
from vil.data.datasets.folder import extensions, format_layout_error
from vil.data.formats.archive import ArchiveDataset, TarArchive, is_hidden
from vil.utils.errors import DataError

LAYOUT = """{problem}. Expected:
{root}
├── train.tar            not compressed; `tar -cf train.tar -C train .` makes it from a folder
│   ├── cat/1.jpg        {extensions}
│   ├── cat/2.png
│   └── dog/3.jpg
└── val.tar              the same classes, other images"""


class Tar(ArchiveDataset):
    """A dataset of the images in a tar. Its classes and sample order are the same as those of the
    dataset `Folder` on the extracted files."""

    def __init__(self, root: Root, split: str, transform: Transform = None, *, channels: int = 3):
        """Read the headers of the tar. channels: see `read_image`."""
        super().__init__(split, transform)
        self.channels, root = channels, Path(root)
        self.archive, folders = open_tar(root / f"{split}.tar", channels)
        names = sorted(set(folders))
        read = partial(class_folders, channels=channels)
        self.classes = classes_of_split(split, names, root / "train.tar", read)
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = [numbers[normalize_name(folder)] for folder in folders]
        self.targets = np.array(labels, np.int64)


def open_tar(file: Path, channels: int = 3) -> tuple[TarArchive, list[str]]:
    """Open a tar, with its images sorted by class folder and file name.

    Returns (archive, class folder of each image).

    Raises DataError if the tar is missing or has no images, or if the path of an image, below an
    optional common folder, is not <class>/<image>.
    """
    if not file.is_file():
        raise DataError(format_layout_error(file.parent, f"there is no {file}", LAYOUT))
    archive = TarArchive(file, partial(is_image, channels=channels))
    parts = [os.fsdecode(name).split("/") for name in archive.names]
    if all(len(p) > 2 and p[0] == parts[0][0] for p in parts):
        parts = [p[1:] for p in parts]
    misplaced = [archive.name(index) for index, path in enumerate(parts) if len(path) != 2]
    if misplaced or not parts:
        problem = f"{misplaced[0]} is not <class>/<image>" if parts else f"{file} has no images"
        raise DataError(format_layout_error(file.parent, problem, LAYOUT))
    order = sorted(range(len(parts)), key=parts.__getitem__)
    archive.names, archive.fields = archive.names[order], archive.fields[order]
    return archive, [parts[i][0] for i in order]


def class_folders(file: Path, channels: int = 3) -> list[str]:
    """Return the sorted names of the class folders in a tar."""
    return sorted(set(open_tar(file, channels)[1]))


def is_image(name: str, size: int, *, channels: int = 3) -> bool:
    """Return whether the name of a tar member is that of an image. Hidden files, and files in
    hidden folders, are not images. size: not used; `Archive` passes it."""
    return name.lower().endswith(extensions(channels)) and not is_hidden(name)
