"""ImageNet in the original 2021 layout: root/{train,val}.zip, each with a {train,val}_map.txt.

A line of the map is `train.zip@n01440764/n01440764_10026.JPEG`, a TAB, and the class number.
"""

import logging
import os
from pathlib import Path

import numpy as np

from vil.data.classes import parse_class
from vil.data.dataset import ImageDataset, Root, Transform
from vil.data.datasets.folder import LAYOUT as FOLDERS
from vil.data.datasets.folder import Folder, extensions, format_layout_error
from vil.data.formats.archive import ArchiveDataset, ZipArchive
from vil.utils.errors import DataError
from vil.utils.plural import plural

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".tiff", ".bmp", ".png")
LAYOUT = """
or, as archives:
{root}
├── train.zip            any folders inside, or none
├── train_map.txt        a line per image: train.zip@cat/1.jpg<TAB>0
├── val.zip
└── val_map.txt"""


def imagenet(
    root: Root,
    split: str,
    transform: Transform = None,
    *,
    num_classes: int | None = None,
    channels: int = 3,
) -> ImageDataset:
    """Build the dataset "imagenet" from root/{split}.zip and root/{split}_map.txt, if both exist,
    else from the class folders in root/{split}.

    num_classes: expected number of classes; None accepts any number. channels: see `read_image`.
    Raises DataError if root has neither both files nor the folder, and ValueError if the number of
    class folders is not `num_classes`.
    """
    root = Path(root)
    folder, zip_file, map_file = (root / f"{split}{end}" for end in ("", ".zip", "_map.txt"))
    exist = [zip_file.is_file(), map_file.is_file()]
    if all(exist) or (any(exist) and not folder.is_dir()):
        return ImageNetZip(root, split, transform, num_classes=num_classes, channels=channels)
    if not folder.is_dir():
        problem = f"there is no {zip_file} and no folder {folder}"
        raise DataError(format_layout_error(root, problem, FOLDERS + LAYOUT))
    dataset = Folder(root, split, transform, channels=channels)
    if num_classes not in (None, len(dataset.classes)):
        raise ValueError(
            f"num_classes is {num_classes}, but {root} has {len(dataset.classes)} folders"
        )
    return dataset


class ImageNetZip(ArchiveDataset):
    """A dataset of the images in root/{split}.zip that are listed in root/{split}_map.txt, in the
    order of the zip."""

    def __init__(
        self,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        num_classes: int | None = None,
        channels: int = 3,
    ):
        """Read the class numbers in {split}_map.txt, and the list of the zip's members.

        num_classes: by default, taken from train_map.txt or, if that is missing, from
        {split}_map.txt. Raises DataError if a file is missing or invalid, or a class is out of
        range.
        """
        super().__init__(split, transform)
        self.channels = channels
        root = Path(root)
        zip_file, map_file = root / f"{split}.zip", root / f"{split}_map.txt"
        for other, missing in ((zip_file, map_file), (map_file, zip_file)):
            if not missing.is_file():
                raise DataError(
                    f"there is no {missing}, which {other} needs: add it. {map_file.name} must "
                    f"have a line '{zip_file.name}@<member><TAB><class number>' for each image"
                )
        if num_classes is None and split != "train" and (root / "train_map.txt").exists():
            num_classes = max(read_map(root / "train_map.txt").values()) + 1
        labels = read_map(map_file, num_classes)
        num_classes = num_classes or max(labels.values()) + 1
        self.classes = [str(number) for number in range(num_classes)]

        endings = extensions(channels, EXTENSIONS)

        def wanted(name: str, size: int) -> bool:
            is_image = name.lower().endswith(endings) and not name.startswith(".")
            return is_image and size > 0 and name in labels

        self.archive = ZipArchive(zip_file, wanted)
        numbers = [labels.pop(os.fsdecode(name)) for name in self.archive.names]
        self.targets = np.array(numbers, np.int64)
        if not len(self.targets):
            raise DataError(
                f"{map_file} names no image of {zip_file}: "
                f"expected file names that end in one of {' '.join(endings)}"
            )
        if labels:
            images = plural(len(labels), "image that is", "images that are")
            text = "%s names %s not in %s, the first: %s"
            logger.warning(text, map_file, images, zip_file, next(iter(labels)))


def read_map(file: Path, num_classes: int | None = None) -> dict[str, int]:
    """Read a file such as train_map.txt, as {member of the zip: class number}. Raises DataError if
    a line is invalid or has a class number that is not below num_classes."""
    labels = {}
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            fields = [field for field in line.rstrip("\r\n").split("\t") if field]
            if not line.strip():
                continue
            if len(fields) < 2 or "@" not in fields[0]:
                raise DataError(
                    f"{file}, line {number}: expected '<zip>@<member><TAB><class>', "
                    f"got {line.strip()[:100]!r}"
                )
            member = fields[0].split("@", 1)[1].removeprefix("/")
            label = parse_class(fields[1], num_classes, file, number)
            if labels.setdefault(member, label) != label:
                raise DataError(
                    f"{file}, line {number}: {member} is class {label}, "
                    f"but was class {labels[member]} before"
                )
    if not labels:
        raise DataError(f"{file} is empty")
    return labels
