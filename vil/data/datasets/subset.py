"""A subset of the samples of a dataset, such as one fold."""

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import ImageDataset


class Subset(ImageDataset):
    """A dataset that consists of the samples of `dataset` at `indices`, in the order of `indices`.

    Images are transformed by the transform of `dataset`.
    """

    splits = ("train", "val", "test")

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

    def __getitem__(self, index: int) -> tuple:
        return self.dataset[int(self.indices[index])][0], self._target(index)

    def image(self, index: int) -> Image.Image | BandImage:
        return self.dataset.image(int(self.indices[index]))

    def content(self, index: int) -> bytes:
        return self.dataset.content(int(self.indices[index]))

    def sample_name(self, index: int) -> str:
        """Return the name that the sample has in the original dataset."""
        return self.dataset.sample_name(int(self.indices[index]))
