"""Concatenate datasets."""

import logging
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


class ConcatImageDataset(ImageDataset):
    """Datasets one after the other. Classes are matched by number, named as in the first dataset.

    Each dataset keeps its own transform. Raises DataError for different numbers of classes.
    """

    def __init__(self, datasets: Sequence[ImageDataset], names: Sequence[str]):
        """`names` of the datasets in the config, for messages and sample names."""
        super().__init__(datasets[0].split)
        if len({len(dataset.classes) for dataset in datasets}) > 1:
            counts = ", ".join(f"{n} {len(d.classes)}" for n, d in zip(names, datasets))
            problem = "datasets with different numbers of classes cannot be concatenated"
            raise DataError(f"{problem}: {counts}")
        differing = [n for n, d in zip(names, datasets) if d.classes != datasets[0].classes]
        if differing:
            text = "%s: the class names differ from those of %s; classes are matched by number"
            logger.warning(text, ", ".join(differing), names[0])
        self.datasets, self.names = list(datasets), list(names)
        self.ends = np.cumsum([len(dataset) for dataset in datasets])
        self.targets = np.concatenate([dataset.targets for dataset in datasets])
        self.classes = datasets[0].classes

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the dataset, and the index within it."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - int(self.ends[number]) + len(self.datasets[number])

    def __getitem__(self, index: int) -> tuple:
        number, local = self.locate(index)
        return self.datasets[number][local]

    def image(self, index: int) -> Image.Image:
        number, local = self.locate(index)
        return self.datasets[number].image(local)

    def sample_name(self, index: int) -> str:
        """<dataset>/<its sample name>."""
        number, local = self.locate(index)
        return f"{self.names[number]}/{self.datasets[number].sample_name(local)}"
