"""Generated pictures: a blob on noise whose hue is its class. For tests, benchmarks, dry runs."""

import colorsys
from collections.abc import Callable

import numpy as np
from PIL import Image

from vil.data.dataset import SPLITS, ImageDataset


class Fake(ImageDataset):
    """n pictures of size x size pixels; a picture depends on (split, index) alone."""

    def __init__(
        self,
        root: object,
        split: str,
        transform: Callable | None = None,
        *,
        n: int = 256,
        size: int = 64,
        num_classes: int = 10,
    ):
        """root is not used: nothing is read."""
        super().__init__(split, transform)
        self.size = size
        self.targets = np.arange(n) % num_classes
        self.classes = [f"hue {360 * c // num_classes}" for c in range(num_classes)]

    def image(self, index: int) -> Image.Image:
        """A blob of random place and width, in its class's hue, on dark noise."""
        random = np.random.default_rng((SPLITS[self.split], index))
        noise = random.integers(0, 64, (self.size, self.size, 3))
        hue = self.targets[index] / len(self.classes)
        colour = 255 * np.array(colorsys.hsv_to_rgb(hue, 1, 1))
        blob = self.blob(random.uniform(0.3, 0.7, 2), random.uniform(0.15, 0.3))
        return Image.fromarray((noise * (1 - blob) + colour * blob).astype(np.uint8))

    def blob(self, centre: np.ndarray, width: float) -> np.ndarray:
        """A Gaussian bump (size, size, 1) of height 1; lengths in units of the picture."""
        axis = (np.arange(self.size) + 0.5) / self.size
        squares = ((axis[:, None] - centre[0]) ** 2) + ((axis[None, :] - centre[1]) ** 2)
        return np.exp(-squares / (2 * width**2))[:, :, None]

    def sample_name(self, index: int) -> str:
        """fake/<split>/<index>."""
        return f"fake/{self.split}/{index}"
