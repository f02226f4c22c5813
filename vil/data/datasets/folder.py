"""A folder of images with one subfolder per class: root/{train,val}/<class>/*.jpg."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.bands import PIL_CHANNELS
from vil.data.classes import classes_of_split
from vil.data.dataset import ImageDataset, Root, Transform
from vil.data.image import read_image
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
LAYOUT = """{problem}. Expected:
{root}
├── train
│   ├── cat
│   │   ├── 1.jpg        {extensions}
│   │   └── 2.png
│   └── dog
│       └── 3.jpg
└── val                  the same classes, other images
    ├── cat
    │   └── 4.jpg
    └── dog
        └── 5.jpg"""


class Folder(ImageDataset):
    """A dataset with one subfolder per class. The sorted subfolders of train define the classes.

    Without a train folder (evaluation only), the subfolders of val define the classes. Raises
    DataError for a missing or empty folder, and if val has a class that is missing from train.
    """

    def __init__(self, root: Root, split: str, transform: Transform = None, *, channels: int = 3):
        """List the images. channels: see `read_image`."""
        super().__init__(split, transform)
        self.root, self.channels = Path(root), channels
        names = class_folders(self.root / split)
        self.classes = classes_of_split(split, names, self.root / "train", class_folders)
        files = [image_files(self.root / split / name, channels) for name in names]
        warn_of_skipped([self.root / split / name for name in names], files)
        labels = [self.classes.index(name) for name in names]
        self.targets = np.repeat(labels, [len(of_class) for of_class in files])
        # Bytes in one array: a list of a million strings would be copied into every forked worker,
        # page by page, as the reference counts change.
        paths = (f"{split}/{n}/{file}" for n, of_class in zip(names, files) for file in of_class)
        self.names = np.array([os.fsencode(path) for path in paths])

    def image(self, index: int) -> Image.Image:
        return read_image(self.root / self.sample_name(index), self.value_range, self.channels)

    def content(self, index: int) -> bytes:
        return (self.root / self.sample_name(index)).read_bytes()

    def sample_name(self, index: int) -> str:
        """Return the image's path relative to the root."""
        return os.fsdecode(self.names[index])


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in `folder`, which is root/train or root/val.
    Raises DataError if there are none."""
    if not folder.is_dir():
        raise DataError(format_layout_error(folder.parent, f"there is no folder {folder}"))
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise DataError(format_layout_error(folder.parent, f"{folder} has no class folders"))
    return names


def extensions(channels: int) -> tuple[str, ...]:
    """Return the endings of the names of images with a number of channels."""
    return EXTENSIONS if channels in PIL_CHANNELS else (*EXTENSIONS, ".npy")


def image_files(folder: Path, channels: int = 3) -> list[str]:
    """Return the sorted file names of the images in a class folder. Raises DataError if there are
    none."""
    endings = extensions(channels)
    files = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.lower().endswith(endings) and not entry.name.startswith(".")
    )
    if not files:
        problem = f"has no images ({' '.join(endings)}): remove it or add some"
        raise DataError(f"the class folder {folder} {problem}")
    return files


def warn_of_skipped(folders: Sequence[Path], files: Sequence[Sequence[str]]) -> None:
    """Log one warning about all entries of class folders that are not images.

    files: the image names in each of the `folders`. Hidden entries are ignored.
    """
    skipped = [
        entry.path
        for folder, images in zip(folders, files)
        for entry in os.scandir(folder)
        if entry.name not in set(images) and not entry.name.startswith(".")
    ]
    if skipped:
        text = "%d entries of class folders are not read (folders, or names without %s), such as %s"
        logger.warning(text, len(skipped), " ".join(EXTENSIONS), min(skipped))


def format_layout_error(root: Path, problem: str, template: str = LAYOUT) -> str:
    """Return an error message: the problem, followed by the directory tree that is expected in
    `root`. template: text of the message, with {problem}, {root} and, optionally, {extensions}."""
    return template.format(problem=problem, root=root, extensions=" ".join(EXTENSIONS))
