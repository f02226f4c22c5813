"""Images without labels: all image files below a folder."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import SPLITS, ImageDataset, Root, Transform
from vil.data.datasets.folder import HELP, extensions, format_layout_error
from vil.utils.errors import DataError
from vil.utils.safe_files import regular_file

CLASS = "image"  # name of the only class


class Images(ImageDataset):
    """All images in root/{train,val,test} and their subfolders. Without a folder train, all images
    below root are the training images. Every image has the same class.

    Hidden files and folders are left out. Raises DataError if there are no images.
    """

    splits = ("train", "val", "test")

    def __init__(self, root: Root, split: str, transform: Transform = None, *, channels: int = 3):
        """List the images. channels: see `read_image`."""
        super().__init__(split, transform)
        self.root, self.channels, self.classes = Path(root), channels, [CLASS]
        folder = self.root / split
        if not self.root.is_dir():
            raise DataError(format_layout_error(self.root, ""))
        if not folder.is_dir():
            is_flat = not any((self.root / name).is_dir() for name in SPLITS)
            if split != "train" or not is_flat:
                help = HELP.get(split, "add it, or move all images out of the folders val and test")
                raise DataError(f"there is no folder {folder}: {help}")
            folder = self.root
        names = list_images(folder, extensions(channels))
        if not names:
            endings = " ".join(extensions(channels))
            raise DataError(f"{folder} has no images ({endings}): set --data to their folder")
        prefix = b"" if folder == self.root else os.fsencode(split) + b"/"
        # bytes in one array, see `Folder`
        self.names = np.array([prefix + os.fsencode(name) for name in names])
        self.targets = np.zeros(len(names), np.int64)

    def content(self, index: int) -> bytes:
        return regular_file(self.root / self.sample_name(index)).read_bytes()

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(self.root / self.sample_name(index))

    def sample_name(self, index: int) -> str:
        """Return the image's path relative to the root."""
        return os.fsdecode(self.names[index])


def list_images(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Return the sorted paths of the image files in a folder and its subfolders, relative to the
    folder, that are not hidden. A folder that links lead to again is read once. endings: of the
    names of image files. Raises DataError if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    found, read = [], set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in read:
            folders.clear()
            continue
        read.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        images = [f for f in files if f.lower().endswith(endings) and not f.startswith(".")]
        found += [os.path.relpath(os.path.join(place, name), folder) for name in images]
    return sorted(found)
