"""Dataset interfaces: ImageDataset for one target per image, LoadableDataset for any targets."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data.bands import BandImage
from vil.data.batch import collate
from vil.data.image import read_image
from vil.utils.errors import DataError
from vil.utils.lookup import lookup
from vil.utils.rgb import WHITE

Root = str | Path
Transform = Callable | None  # takes an image; the result replaces the image in a sample
# Part of the random seed of generated datasets, so that their splits differ.
SPLITS = {"train": 0, "val": 1, "test": 2}
MAX_NAMES = 10_000  # names that `fingerprint` hashes
MAX_IMAGES, MAX_BYTES = 64, 2**28  # images that `image_digests` hashes, and their total size


class CollatableDataset(Protocol):
    """The interface that `RobustDataset` needs from a dataset.

    `__getitem__` raises OSError for an unreadable image, which is logged and skipped. Any other
    exception stops the run.
    """

    @property
    def collate(self) -> Callable[[list, tuple], Any]:
        """A function that maps ([(image, target, index)], (BadSample, ...)) to a batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple: ...  # (image, target)

    def sample_name(self, index: int) -> str: ...


class LoadableDataset(CollatableDataset, Protocol):
    """The interface that the loaders need from a dataset, for any kind of target.

    The optional attribute `groups` (N,) int64 has the group of each of the N samples, such as 0 for
    tall and 1 for wide images. A training batch then has samples of a single group, as far as
    possible.
    """

    classes: list[str]


def fingerprint(dataset: LoadableDataset) -> str:
    """Return a string that identifies a dataset: its length, a hash of its targets and sample
    names, and a hash of its class names, sample weights, boxes and labels. If there are more than
    MAX_NAMES names, only MAX_NAMES evenly spaced ones are hashed.

    Older checkpoints have the string without the second hash.
    """
    digest, more = hashlib.sha256(), hashlib.sha256()
    targets = np.ascontiguousarray(getattr(dataset, "targets", ()))
    if targets.dtype == np.float64:
        targets = targets.astype(np.float32)  # so that numbers have one fingerprint in both types
    digest.update(targets.tobytes())
    for index in spaced(dataset, MAX_NAMES):
        digest.update(os.fsencode(dataset.sample_name(index)) + b"\0")
    more.update(
        "\0".join(map(str, getattr(dataset, "classes", ()))).encode(errors="surrogateescape")
    )
    for name in ("weights", "boxes", "labels"):
        if (values := getattr(dataset, name, None)) is not None:
            more.update(np.ascontiguousarray(values).tobytes())
    return f"{len(dataset)} samples {digest.hexdigest()[:16]} {more.hexdigest()[:16]}"


def image_digests(dataset: LoadableDataset) -> list[str]:
    """Return short hashes of the content of MAX_IMAGES evenly spaced images, by which images that
    were replaced under the same names can be found. The hash of an image is "" if it cannot be
    read, if it is not in a file, or if the images before it have more than MAX_BYTES."""
    digests, left = [], MAX_BYTES
    for index in spaced(dataset, MAX_IMAGES):
        content = file_content(dataset, index) if left > 0 else b""
        digests.append(hashlib.sha256(content).hexdigest()[:8] if content else "")
        left -= len(content)
    return digests


def spaced(dataset: LoadableDataset, most: int) -> list[int]:
    """Return the indices of at most `most` evenly spaced samples."""
    return np.linspace(0, len(dataset) - 1, min(len(dataset), most)).astype(int).tolist()


def file_content(dataset: Any, index: int) -> bytes:
    """Return the bytes of an image file, or b"" if it cannot be read or does not exist."""
    while hasattr(dataset, "locate"):  # a ComposedDataset
        dataset, index = dataset.locate(index)
    read = getattr(type(dataset), "content", ImageDataset.content)
    if read is ImageDataset.content:  # of pixels, which a plug-in may draw at random
        return b""
    try:
        return dataset.content(index)
    except OSError:
        return b""


class ImageDataset(Dataset, ABC):
    """A dataset with one target per image: dataset[i] returns (image, target).

    image is the output of `transform`, or an RGB PIL image without a transform. A subclass sets
    `classes` and `targets` and defines `image` and `sample_name`. If its constructor takes the
    keyword `channels`, images can also be gray or have many bands, see `read_image`.

    target_type  targets                     an item's target  classes
    "class"      (N,) int64, class numbers   int               names of the classes
    "labels"     (N, K) float32, 0 or 1      (K,) float32      names of the K labels
    "numbers"    (N, K) float64              (K,) float64      names of the K numbers
    """

    collate = staticmethod(collate)
    target_type = "class"
    splits: Sequence[str] = ("train", "val")  # those that the dataset can open
    weights: np.ndarray | None = None  # (N,) float32, sample weights; None if all are equal
    # (N,) int64: samples with the same number must be in the same split, also those of two datasets
    # (see `vil.data.splits.number_keys`); -1 for no group
    split_groups: np.ndarray | None = None
    value_range: Sequence[float] = ()  # for images of more than 8 bits, see `to_rgb`
    channels = 3  # see `read_image`
    background: Sequence[int] = WHITE  # behind transparent pixels, see `read_image`
    classes: list[str]
    targets: np.ndarray  # not a list, which every forked worker would copy

    def __init__(self, split: str, transform: Transform = None):
        lookup(SPLITS, split, "split")
        if split not in self.splits:
            raise DataError(
                f"the dataset {type(self).__name__} has no {split} split, only "
                f"{' and '.join(self.splits)}: set DATA.{split.upper()}_FRACTION, or name another "
                f"dataset in DATA.{split.upper()}"
            )
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple:
        image = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        return image, self._target(index)

    def _target(self, index: int) -> int | np.ndarray:
        target = self.targets[index]
        return int(target) if self.target_type == "class" else target

    def reorder_classes(self, names: Sequence[str]) -> None:
        """Reorder `classes` to the order of `names`, and update `targets` accordingly.

        names: the new list of classes. It has all `classes`, and can have additional ones.
        """
        if self.target_type == "class":
            number = {name: index for index, name in enumerate(names)}
            self.targets = np.array([number[name] for name in self.classes])[self.targets]
        else:
            column = {name: index for index, name in enumerate(self.classes)}
            padded = np.pad(self.targets, ((0, 0), (0, 1)))  # -1 is a column of zeros
            self.targets = padded[:, [column.get(name, -1) for name in names]]
        self.classes = list(names)

    def read(self, source: str | Path | BinaryIO) -> Image.Image | BandImage:
        """Decode an image file as the config says, see `read_image`."""
        return read_image(source, self.value_range, self.channels, self.background)

    @abstractmethod
    def image(self, index: int) -> Image.Image | BandImage:
        """Return the image before any transform: in RGB, or as a `BandImage` if it has other
        channels. Raises OSError if it cannot be read."""

    def content(self, index: int) -> bytes:
        """Return bytes that are equal for two samples only if their images are identical.

        Subclasses that read image files return the bytes of the file, which is faster than
        decoding. Raises OSError if the image cannot be read.
        """
        image = self.image(index)
        return f"{image.mode} {image.width}x{image.height} ".encode() + image.tobytes()

    @abstractmethod
    def sample_name(self, index: int) -> str:
        """Return a name by which a user can find the sample, such as its path below the root."""
