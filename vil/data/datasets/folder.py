"""A folder of pictures, one sub-folder per class: root/{train,val}/<class>/*.jpg."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.classes import trained_classes
from vil.data.dataset import ImageDataset
from vil.data.image import read_image
from vil.utils.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
LAYOUT = """{problem}. Expected:
{root}
├── train
│   ├── cat
│   │   ├── 1.jpg        {extensions}
│   │   └── 2.png
│   └── dog
│       └── 3.jpg
└── val                  the same classes, other pictures
    ├── cat
    │   └── 4.jpg
    └── dog
        └── 5.jpg"""


class Folder(ImageDataset):
    """Classes are train's sub-folders in sorted order, and a validation class must be one of them.

    Without a train folder (somebody who only evaluates) val's own sub-folders are the classes.
    """

    def __init__(self, root: str | Path, split: str, transform: Callable | None = None):
        super().__init__(split, transform)
        self.root = Path(root)
        found = class_folders(self.root / split)
        self.classes = trained_classes(split, found, self.root / "train", class_folders)
        files = [pictures(self.root / split / name) for name in found]
        labels = [self.classes.index(name) for name in found]
        self.targets = np.repeat(labels, [len(names) for names in files])
        # Bytes in one buffer: a list of a million strings is copied into every forked worker, page
        # by page, as their reference counts change.
        self.names = np.array(
            [
                os.fsencode(f"{split}/{name}/{file}")
                for name, names in zip(found, files)
                for file in names
            ]
        )

    def image(self, index: int) -> Image.Image:
        """The decoded file. Raises UnreadableImage."""
        return read_image(self.root / self.sample_name(index))

    def sample_name(self, index: int) -> str:
        """The path below the root."""
        return os.fsdecode(self.names[index])


def class_folders(folder: Path) -> list[str]:
    """Names of the sub-folders of root/train or root/val, sorted."""
    if not folder.is_dir():
        raise DataError(layout(folder.parent, f"there is no folder {folder}"))
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise DataError(layout(folder.parent, f"{folder} has no class folders"))
    return names


def pictures(folder: Path) -> list[str]:
    """File names of one class, sorted; a class without pictures is a DataError."""
    files = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".")
    )
    if not files:
        kinds = " ".join(EXTENSIONS)
        raise DataError(
            f"the class folder {folder} has no pictures ({kinds}): remove it, or put some there"
        )
    return files


def layout(root: Path, problem: str) -> str:
    """The problem, with a drawing of what a dataset looks like."""
    return LAYOUT.format(problem=problem, root=root, extensions=" ".join(EXTENSIONS))
