"""A folder of images with one subfolder per class: root/{train,val,test}/<class>/*.jpg, or
root/<class>/*.jpg for training images only."""

import logging
import os
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.bands import PIL_CHANNELS, BandImage
from vil.data.classes import classes_of_split, normalize_name
from vil.data.dataset import SPLITS, ImageDataset, Root, Transform
from vil.utils.errors import DataError
from vil.utils.lookup import did_you_mean
from vil.utils.plural import plural
from vil.utils.safe_files import regular_file

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
└── val                  the same classes, other images; if DATA.VAL is set, also test
    ├── cat
    │   └── 4.jpg
    └── dog
        └── 5.jpg
or training images only, if DATA.VAL_FRACTION (and DATA.TEST_FRACTION) hold out some of them:
{root}
├── cat
│   └── 1.jpg
└── dog
    └── 2.jpg"""
SYSTEM_FILES = ("Thumbs.db", "desktop.ini")  # which Windows writes
HELP = {
    "val": "add it, or train with DATA.VAL_FRACTION 0.2, which holds out training images",
    "test": "add it, or train with DATA.TEST_FRACTION 0.2, which holds out training images",
}


class Folder(ImageDataset):
    """A dataset in the folders train, val and test below root, with one subfolder per class.

    The subfolders of train are the classes of all splits. Without train, each split has its own
    classes. If none of the three folders exists, root itself is used as train. Raises DataError for
    a missing or empty folder, and for a class of val or test that train lacks.
    """

    splits = ("train", "val", "test")

    def __init__(self, root: Root, split: str, transform: Transform = None, *, channels: int = 3):
        """List the images. channels: see `read_image`."""
        super().__init__(split, transform)
        self.root, self.channels = Path(root), channels
        folder = split_folder(self.root, split)
        names = class_folders(folder)
        self.classes = classes_of_split(split, names, self.root / "train", class_folders)
        files, skipped = [], []
        for name in names:
            images, others = image_files(folder / name, channels)
            files.append(images)
            skipped += others
        if skipped:
            forms = "entry of class folders is", "entries of class folders are"
            text = "%s ignored (folders, or names without %s), such as %s"
            entries, endings = plural(len(skipped), *forms), " ".join(extensions(channels))
            logger.warning(text, entries, endings, min(skipped))
        labels = [self.classes.index(normalize_name(name)) for name in names]
        self.targets = np.repeat(labels, [len(of_class) for of_class in files])
        # Bytes in one array: a list of a million strings would be copied into every forked worker,
        # page by page, as the reference counts change.
        prefix = "" if folder == self.root else f"{split}/"
        paths = (f"{prefix}{n}/{file}" for n, of_class in zip(names, files) for file in of_class)
        self.names = np.array([os.fsencode(path) for path in paths])

    def content(self, index: int) -> bytes:
        return regular_file(self.root / self.sample_name(index)).read_bytes()

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(self.root / self.sample_name(index))

    def sample_name(self, index: int) -> str:
        """Return the image's path relative to the root."""
        return os.fsdecode(self.names[index])


def split_folder(root: Path, split: str) -> Path:
    """Return the folder of a split, root/<split>.

    If `root` has class folders, but none of the folders train, val and test, the folder of the
    split "train" is `root` itself. Raises DataError if the folder of the split does not exist.
    """
    folder = root / split
    if folder.is_dir():
        return folder
    is_flat = not any((root / name).is_dir() for name in SPLITS)
    if is_flat and root.is_dir() and names_of_folders(root):
        if split == "train":
            return root
        problem = f"{root} has class folders but no folder {split}: {HELP[split]}"
    else:
        problem = f"there is no folder {folder}" + (f": {HELP[split]}" if split in HELP else "")
    raise DataError(format_layout_error(root, problem))


def names_of_folders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders that are not hidden."""
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in `folder`, the folder of a split. Raises
    DataError if there are none."""
    if not folder.is_dir():
        raise DataError(format_layout_error(folder.parent, f"there is no folder {folder}"))
    names = names_of_folders(folder)
    if not names:
        raise DataError(format_layout_error(folder.parent, f"{folder} has no class folders"))
    return names


def extensions(channels: int, known: tuple[str, ...] = EXTENSIONS) -> tuple[str, ...]:
    """Return the file extensions of images with the given number of channels. known: the extensions
    of images with 1 or 3 channels."""
    return known if channels in PIL_CHANNELS else (*known, ".npy")


def image_files(folder: Path, channels: int) -> tuple[list[str], list[str]]:
    """List a class folder. Returns (sorted names of the image files, paths of everything else that
    is not hidden or in SYSTEM_FILES). Raises DataError if there are no images."""
    endings, files, others = extensions(channels), [], []
    for name in os.listdir(folder):
        if not name.startswith(".") and name not in SYSTEM_FILES:
            is_image = name.lower().endswith(endings)
            (files if is_image else others).append(name)
    if not files:
        problem = f"has no images ({' '.join(endings)}): add images, or remove the folder"
        raise DataError(f"the class folder {folder} {problem}")
    return sorted(files), [f"{folder}/{name}" for name in others]


def format_layout_error(root: Path, problem: str, template: str = LAYOUT) -> str:
    """Return an error message that states the problem and shows the expected directory tree. If
    `root` does not exist, the message only says so. template: text of the message, with the fields
    {problem}, {root} and, optionally, {extensions}."""
    if not root.exists():
        siblings = names_of_folders(root.parent) if root.parent.is_dir() else []
        near = (str(root.parent / name) for name in get_close_matches(root.name, siblings, n=1))
        problem = f"there is no folder {root}: set --data to the folder of your images"
        return problem + did_you_mean(*near)
    return template.format(problem=problem, root=root, extensions=" ".join(EXTENSIONS))
