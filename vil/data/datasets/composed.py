"""Datasets whose samples are those of other datasets: a selection, or several datasets in a row."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError


class ComposedDataset(ImageDataset):
    """A base class of datasets that read the images of others, with the transforms of these."""

    splits = ("train", "val", "test")

    @abstractmethod
    def locate(self, index: int) -> tuple[ImageDataset, int]:
        """Return the dataset that has the sample `index`, and the sample's index in it."""

    def __getitem__(self, index: int) -> tuple:
        dataset, local = self.locate(index)
        return dataset[local][0], self._target(index)

    def image(self, index: int) -> Image.Image | BandImage:
        dataset, local = self.locate(index)
        return dataset.image(local)

    def content(self, index: int) -> bytes:
        dataset, local = self.locate(index)
        return dataset.content(local)

    def sample_name(self, index: int) -> str:
        """Return the name that the sample has in its original dataset."""
        dataset, local = self.locate(index)
        return dataset.sample_name(local)


class Subset(ComposedDataset):
    """The samples of `dataset` at `indices`, in the order of `indices`, such as one fold."""

    def __init__(self, dataset: ImageDataset, indices: np.ndarray, split: str):
        """Select samples. indices: (N,) int64 indices of samples of `dataset`. split: name of the
        split that the selected samples form, such as "val"."""
        super().__init__(split)
        self.dataset, self.indices = dataset, np.asarray(indices, np.int64)
        self.classes, self.target_type = dataset.classes, dataset.target_type
        self.targets, self.channels = dataset.targets[self.indices], dataset.channels
        for name in ("weights", "split_groups"):
            if (values := getattr(dataset, name)) is not None:
                setattr(self, name, values[self.indices])

    def locate(self, index: int) -> tuple[ImageDataset, int]:
        return self.dataset, int(self.indices[index])


class ConcatImageDataset(ComposedDataset):
    """A concatenation of datasets with the same number of classes.

    Classes are matched by number and have the names of the first dataset. Raises DataError if the
    numbers of classes differ.
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
            weights = [
                np.ones(len(d), np.float32) if d.weights is None else d.weights for d in datasets
            ]
            self.weights = np.concatenate(weights)

    def locate(self, index: int) -> tuple[ImageDataset, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        dataset = self.datasets[number]
        return dataset, index - int(self.ends[number]) + len(dataset)

    def sample_name(self, index: int) -> str:
        """Return <dataset>/<name of the sample in that dataset>."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return f"{self.names[number]}/{super().sample_name(index)}"
