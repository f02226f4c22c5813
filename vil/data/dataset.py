"""Interfaces of datasets: ImageDataset for classification, LoadableDataset for any target."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data.batch import collate
from vil.utils.lookup import lookup

Root = str | Path
Transform = Callable | None  # takes a PIL image; the result replaces it in a sample
# Part of the random key of generated datasets, so that their splits differ.
SPLITS = {"train": 0, "val": 1}
MAX_NAMES = 10_000  # hashed by `fingerprint`


class LoadableDataset(Protocol):
    """The interface that the loaders need from a dataset, for any kind of target.

    `__getitem__` raises OSError if an image cannot be read. The loaders count these errors and
    continue. Any other exception stops the run. An optional attribute `groups` (N,) int64 assigns
    each of the N samples to a group. Training batches then hold samples of a single group as far as
    possible.
    """

    classes: list[str]
    collate: Callable[[list, tuple], Any]  # ([(image, target, index)], (BadSample, ...)) -> batch

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple: ...  # (image, target)

    def sample_name(self, index: int) -> str: ...


def fingerprint(dataset: LoadableDataset) -> str:
    """Return a string that identifies a dataset: its length, and a hash of its targets and sample
    names. Of a large dataset, only MAX_NAMES evenly spaced names are hashed."""
    count, digest = len(dataset), hashlib.sha256()
    digest.update(np.ascontiguousarray(getattr(dataset, "targets", ())).tobytes())
    for index in np.linspace(0, count - 1, min(count, MAX_NAMES)).astype(int).tolist():
        digest.update(os.fsencode(dataset.sample_name(index)) + b"\0")
    return f"{count} samples {digest.hexdigest()[:16]}"


class ImageDataset(Dataset, ABC):
    """A dataset with one target per image: dataset[i] returns (image, target).

    image is the output of `transform`, or an RGB PIL image if there is no transform. A subclass
    sets `classes` and `targets` and defines `image` and `sample_name`. If it takes the keyword
    `channels`, its images can have other channels, see `read_image`. The kinds of targets are:

    target_type  targets                     an item's target  classes
    "class"      (N,) int64, class numbers   int               names of the classes
    "labels"     (N, K) float32, 0 or 1      (K,) float32      names of the K labels
    "numbers"    (N, K) float32              (K,) float32      names of the K numbers
    """

    collate = staticmethod(collate)
    target_type = "class"
    value_range: Sequence[float] = ()  # for images of more than 8 bits, see `to_rgb`
    channels = 3  # see `read_image`
    classes: list[str]
    targets: np.ndarray  # not a list, which every forked worker would copy

    def __init__(self, split: str, transform: Transform = None):
        lookup(SPLITS, split, "split")
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple:
        image = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        target = self.targets[index]
        return image, int(target) if self.target_type == "class" else target

    def reorder_classes(self, names: Sequence[str]) -> None:
        """Renumber `classes` and `targets` to the order of `names`, a permutation of `classes`."""
        if self.target_type == "class":
            number = {name: index for index, name in enumerate(names)}
            self.targets = np.array([number[name] for name in self.classes])[self.targets]
        else:
            self.targets = self.targets[:, [self.classes.index(name) for name in names]]
        self.classes = list(names)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Return the RGB image, or a BandImage, before any transform. Raises OSError if it cannot
        be read."""

    def content(self, index: int) -> bytes:
        """Return the content of an image, to find duplicates: the bytes of its file, or the decoded
        pixels if it has no file of its own. Raises OSError if it cannot be read."""
        return self.image(index).tobytes()

    @abstractmethod
    def sample_name(self, index: int) -> str:
        """Return a name that helps a user find the sample: a path below the root or in a zip."""
