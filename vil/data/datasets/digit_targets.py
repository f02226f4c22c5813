"""Datasets for regression and multilabel classification, composed from scikit-learn's digits.

The training images are composed from training digits only, and the validation images from
validation digits only. Image i of a split depends on (split, i) alone.
"""

import math

import numpy as np
from PIL import Image

from vil.data.dataset import SPLITS, ImageDataset, Transform
from vil.data.datasets.digits import load, split_indices

Resampling = Image.Resampling


class DigitAngles(ImageDataset):
    """A regression dataset that contains every digit of the split, rotated by a random angle.

    The target is the angle in degrees, counterclockwise, uniform in -60..60.
    """

    target_type = "numbers"
    RANGE = 60.0  # degrees

    def __init__(
        self,
        root: object,
        split: str,
        transform: Transform = None,
        *,
        size: int = 64,
        copies: int = 1,
    ):
        """Load a split. root is not used. size: pixels per side. copies: number of images per
        digit, each with a different angle."""
        super().__init__(split, transform)
        pixels, targets = load()
        self.indices, self.size = np.tile(split_indices(targets, split), copies), size
        self.pixels, self.classes = pixels[self.indices], ["angle"]
        angles = np.random.RandomState(SPLITS[split]).uniform(-1, 1, len(self.indices))
        self.targets = (self.RANGE * angles)[:, None].astype(np.float32)

    def image(self, index: int) -> Image.Image:
        side = self.size * 3 // 4
        digit = Image.fromarray(self.pixels[index]).resize((side, side), Resampling.BICUBIC)
        canvas = Image.new("L", (self.size, self.size))
        canvas.paste(digit, ((self.size - side) // 2,) * 2)
        return canvas.rotate(float(self.targets[index, 0]), Resampling.BICUBIC).convert("RGB")

    def sample_name(self, index: int) -> str:
        """Return digit_angles/<number of the image>-<index in scikit-learn's data>."""
        return f"digit_angles/{index}-{self.indices[index]}"


class DigitSets(ImageDataset):
    """A multilabel dataset of scenes with one to `most` digits in random cells of a 3 x 3 grid.

    The labels of a scene are the digits that it contains.
    """

    target_type = "labels"
    GRID = 3  # cells per side

    def __init__(
        self,
        root: object,
        split: str,
        transform: Transform = None,
        *,
        size: int = 96,
        n: int = 2000,
        most: int = 5,
    ):
        """Compose scenes of size x size pixels. n: number of training scenes; there are n / 4
        validation scenes. root is not used. most: largest number of digits in a scene."""
        super().__init__(split, transform)
        if not 1 <= most <= self.GRID**2:
            raise ValueError(f"digit_sets: `most` must be 1 to {self.GRID**2}, got {most}")
        pixels, digits = load()
        pool, self.size, self.pixels = split_indices(digits, split), size, pixels
        count = n if split == "train" else math.ceil(n / 4)
        random = np.random.RandomState(10 + SPLITS[split])
        self.cells = np.full((count, self.GRID**2), -1)  # index of the digit in each cell
        self.targets = np.zeros((count, 10), np.float32)
        for cells, labels in zip(self.cells, self.targets):
            chosen = random.choice(pool, random.randint(1, most + 1), replace=False)
            cells[random.permutation(self.GRID**2)[: len(chosen)]] = chosen
            labels[digits[chosen]] = 1
        self.classes = [str(digit) for digit in range(10)]

    def image(self, index: int) -> Image.Image:
        canvas, side = Image.new("L", (self.size, self.size)), self.size // self.GRID
        for cell, number in enumerate(self.cells[index]):
            if number >= 0:
                digit = Image.fromarray(self.pixels[number])
                row, column = divmod(cell, self.GRID)
                place = (column * side, row * side)
                canvas.paste(digit.resize((side, side), Resampling.BICUBIC), place)
        return canvas.convert("RGB")

    def sample_name(self, index: int) -> str:
        """Return digit_sets/<split>/<number of the scene>."""
        return f"digit_sets/{self.split}/{index}"
