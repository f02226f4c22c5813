"""Synthetic images for tests, benchmarks and dry runs. Each image shows a blob in the hue of its
class, on noise."""

import colorsys
import operator

import numpy as np
from PIL import Image

from vil.data.bands import PIL_CHANNELS, BandImage, make_bands
from vil.data.dataset import SPLITS, ImageDataset, Transform


class Fake(ImageDataset):
    """A dataset of n synthetic images of size x size pixels, seeded by (split, index)."""

    splits = ("train", "val", "test")

    def __init__(
        self,
        root: object,
        split: str,
        transform: Transform = None,
        *,
        n: int = 256,
        size: int = 64,
        num_classes: int = 10,
        target_type: str = "class",
        channels: int = 3,
    ):
        """Create a dataset of n images of size x size pixels. root is not used.

        target_type: "class" for class numbers as targets, "labels" or "numbers" for one-hot
        vectors. channels: 1 and 3 give RGB images, which transforms convert to gray if needed.
        Other numbers give images with this number of bands, which repeat the RGB channels.
        """
        super().__init__(split, transform)
        self.channels = channels
        self.size, self.target_type = operator.index(size), target_type
        self.hues = np.arange(operator.index(n)) % num_classes
        one_hot = np.eye(num_classes, dtype=np.float32)
        self.targets = self.hues if target_type == "class" else one_hot[self.hues]
        self.classes = [f"hue {360 * c // num_classes}" for c in range(num_classes)]

    def image(self, index: int) -> Image.Image | BandImage:
        """Draw a blob on dark noise, in the hue of the image's class. The blob's position and width
        are random."""
        random = np.random.default_rng((SPLITS[self.split], index))
        noise = random.integers(0, 64, (self.size, self.size, 3))
        hue = self.hues[index] / len(self.classes)
        color = 255 * np.array(colorsys.hsv_to_rgb(hue, 1, 1))
        center, width = random.uniform(0.3, 0.7, 2), random.uniform(0.15, 0.3)  # in image sides
        axis = (np.arange(self.size) + 0.5) / self.size
        squares = ((axis[:, None] - center[0]) ** 2) + ((axis[None, :] - center[1]) ** 2)
        blob = np.exp(-squares / (2 * width**2))[:, :, None]
        pixels = (noise * (1 - blob) + color * blob).astype(np.uint8)
        if self.channels in PIL_CHANNELS:
            return Image.fromarray(pixels)
        return make_bands(pixels[:, :, np.arange(self.channels) % 3])

    def sample_name(self, index: int) -> str:
        """Return fake/<split>/<index>."""
        return f"fake/{self.split}/{index}"
