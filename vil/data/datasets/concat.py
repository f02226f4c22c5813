"""Several datasets as one, one after the other."""

import logging
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


class ConcatImageDataset(ImageDataset):
    """Class n of one set is class n of all; the names are those of the first set.

    Each set keeps its own transform. DataError when they have different numbers of classes.
    """

    def __init__(self, datasets: Sequence[ImageDataset], names: Sequence[str]):
        """`names` of the sets, as the user calls them."""
        super().__init__(datasets[0].split)
        refuse_different(datasets, names)
        self.datasets, self.names = list(datasets), list(names)
        self.ends = np.cumsum([len(dataset) for dataset in datasets])
        self.targets = np.concatenate([dataset.targets for dataset in datasets])
        self.classes = datasets[0].classes

    def locate(self, index: int) -> tuple[int, int]:
        """The set's number, and the sample's within it."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - (int(self.ends[number - 1]) if number else 0)

    def __getitem__(self, index: int) -> tuple:
        number, own = self.locate(index)
        return self.datasets[number][own]

    def image(self, index: int) -> Image.Image:
        """The set's own."""
        number, own = self.locate(index)
        return self.datasets[number].image(own)

    def sample_name(self, index: int) -> str:
        """The set's own, after the set's name."""
        number, own = self.locate(index)
        return f"{self.names[number]}/{self.datasets[number].sample_name(own)}"


def refuse_different(datasets: Sequence[ImageDataset], names: Sequence[str]) -> None:
    """DataError for different numbers of classes, one warning for different names."""
    if len({len(dataset.classes) for dataset in datasets}) > 1:
        counts = ", ".join(f"{n} {len(d.classes)}" for n, d in zip(names, datasets))
        raise DataError(f"sets with different numbers of classes cannot be joined: {counts}")
    others = [n for n, d in zip(names, datasets) if d.classes != datasets[0].classes]
    if others:
        logger.warning(
            "the classes of %s are not called as those of %s: joined by their numbers",
            ", ".join(others),
            names[0],
        )
