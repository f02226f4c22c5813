"""The interface of datasets: images with one class each, by index."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data.batch import collate
from vil.utils.lookup import lookup

Root = str | Path
Transform = Callable | None  # from a PIL image to what a sample has in its place
# The numbers are part of the random key of generated datasets: their splits must differ.
SPLITS = {"train": 0, "val": 1}


class LoadableDataset(Protocol):
    """What the loaders need from a dataset, for any kind of target.

    `__getitem__` raises OSError for an image that cannot be read: the loaders count it and
    continue. Any other error stops the run. If there is an attribute `groups` (N,) int64, training
    batches hold samples of one group as far as possible.
    """

    classes: list[str]
    collate: Callable[[list, tuple], Any]  # (sample, index)s and `BadSample`s -> a batch

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple: ...  # (image, target)

    def sample_name(self, index: int) -> str: ...


class ImageDataset(Dataset, ABC):
    """dataset[i] -> (image, target): an RGB PIL image or the output of `transform`, and an int.

    A subclass sets `classes` and `targets` and defines `image` and `sample_name`.
    """

    collate = staticmethod(collate)
    classes: list[str]
    targets: np.ndarray  # (N,) int64: forked workers share the pages of an array, not of a list

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
        return image, int(self.targets[index])

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The RGB image before any transform. Raises OSError if it cannot be read."""

    @abstractmethod
    def sample_name(self, index: int) -> str:
        """A name by which a user finds the sample: a path below the root, an archive member."""
