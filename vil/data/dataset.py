"""What every row of DATASETS gives: pictures with one class each, by index."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data.batch import collate
from vil.utils.lookup import lookup

# The number keeps the two splits apart where a dataset is generated.
SPLITS = {"train": 0, "val": 1}


class LoadableDataset(Protocol):
    """What the loaders ask of a dataset, whatever its targets are.

    A picture that cannot be read is an OSError, which they count and forgive; every other error
    ends the run. One that also has `groups` (N,) int64 gets training batches of one group each, as
    far as possible.
    """

    classes: list[str]
    collate: Callable[[list], Any]  # rows of `RobustDataset` -> a batch

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple: ...  # (image, target)

    def sample_name(self, index: int) -> str: ...


class ImageDataset(Dataset, ABC):
    """ds[i] -> (image, target): a PIL RGB image, or what `transform` makes of it, and an int.

    A subclass sets the two fields and writes `image` and `sample_name`, of which `image` raises
    OSError for a picture that cannot be read.
    """

    collate = staticmethod(collate)
    classes: list[str]
    targets: np.ndarray  # (N,) int64: one buffer, whose pages forked workers share for good

    def __init__(self, split: str, transform: Callable | None = None):
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
        """The RGB picture before any transform."""

    @abstractmethod
    def sample_name(self, index: int) -> str:
        """What a person would look for: a path below the root, a member of an archive."""
