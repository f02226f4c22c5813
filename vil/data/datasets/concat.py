"""Concatenate several image datasets into one."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError


class ConcatImageDataset(ImageDataset):
    """A concatenation of datasets with the same number of classes.

    Classes are matched by number and have the names of the first dataset. Each dataset applies its
    own transform. Raises DataError if the numbers of classes differ.
    """

    def __init__(self, datasets: Sequence[ImageDataset], names: Sequence[str]):
        """Concatenate datasets. names: names of the datasets, for messages and sample names."""
        super().__init__(datasets[0].split)
        if len({len(dataset.classes) for dataset in datasets}) > 1:
            counts = ", ".join(f"{n} {len(d.classes)}" for n, d in zip(names, datasets))
            problem = "datasets with different numbers of classes cannot be concatenated"
            raise DataError(f"{problem}: {counts}")
        self.datasets, self.names = list(datasets), list(names)
        self.ends = np.cumsum([len(dataset) for dataset in datasets])
        self.targets = np.concatenate([dataset.targets for dataset in datasets])
        self.classes, self.target_type = datasets[0].classes, datasets[0].target_type
        self.channels = datasets[0].channels
        if any(dataset.weights is not None for dataset in datasets):
            self.weights = np.concatenate([weights_or_ones(dataset) for dataset in datasets])

    def locate(self, index: int) -> tuple[int, int]:
        """Find the sample at `index` of the concatenation. Returns (index of the dataset, index of
        the sample in that dataset)."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - int(self.ends[number]) + len(self.datasets[number])

    def __getitem__(self, index: int) -> tuple:
        number, local = self.locate(index)
        return self.datasets[number][local][0], self._target(index)

    def image(self, index: int) -> Image.Image | BandImage:
        number, local = self.locate(index)
        return self.datasets[number].image(local)

    def content(self, index: int) -> bytes:
        number, local = self.locate(index)
        return self.datasets[number].content(local)

    def sample_name(self, index: int) -> str:
        """Return <dataset>/<name of the sample in that dataset>."""
        number, local = self.locate(index)
        return f"{self.names[number]}/{self.datasets[number].sample_name(local)}"


def weights_or_ones(dataset: ImageDataset) -> np.ndarray:
    """Return the sample weights (N,) float32 of a dataset; ones if it has no weights."""
    return np.ones(len(dataset), np.float32) if dataset.weights is None else dataset.weights
