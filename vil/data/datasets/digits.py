"""A dataset of 1,797 scanned digits of 8 x 8 pixels, which are part of scikit-learn.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

import io
from typing import cast

import numpy as np
from PIL import Image

from vil.data.dataset import ImageDataset, Transform
from vil.data.datasets.image_list import ImageSource


class Digits(ImageDataset):
    """A dataset of 1,437 training and 360 validation digits, enlarged to `size` x `size` RGB."""

    def __init__(
        self,
        root: object,
        split: str,
        transform: Transform = None,
        *,
        size: int = 64,
        num_classes: int = 10,
    ):
        """Load the digits 0 to num_classes - 1 (2 to 10 classes) of a split. root is not used."""
        super().__init__(split, transform)
        if not 2 <= num_classes <= 10:
            raise ValueError(f"digits: num_classes must be 2 to 10, got {num_classes}")
        pixels, targets = load()
        indices = split_indices(targets, split)
        self.size, self.indices = size, indices[targets[indices] < num_classes]
        self.pixels, self.targets = pixels[self.indices], targets[self.indices]
        self.classes = [str(digit) for digit in range(num_classes)]

    def image(self, index: int) -> Image.Image:
        small = Image.fromarray(self.pixels[index])
        return small.resize((self.size, self.size), Image.Resampling.BICUBIC).convert("RGB")

    def sample_name(self, index: int) -> str:
        """Return digits/<index in scikit-learn's data>."""
        return f"digits/{self.indices[index]}"


def load() -> tuple[np.ndarray, np.ndarray]:
    """Load all digits of scikit-learn. Returns (pixels, targets): (1797, 8, 8) uint8 in 0..255, and
    (1797,) int64."""
    from sklearn.datasets import load_digits
    from sklearn.utils import Bunch

    table = cast(Bunch, load_digits())
    pixels = np.round(table.images * (255 / 16)).astype(np.uint8)
    return pixels, table.target.astype(np.int64)


def split_indices(targets: np.ndarray, split: str) -> np.ndarray:
    """Return the sorted indices of the samples in a split.

    All samples are shuffled and then ordered by class. Every fifth one belongs to validation. The
    split is the same in all numpy versions.
    """
    shuffle = np.random.RandomState(0).permutation(len(targets))
    by_class = shuffle[np.argsort(targets[shuffle], kind="stable")]
    is_val = np.arange(len(targets)) % 5 == 0
    return np.sort(by_class[is_val if split == "val" else ~is_val])


def read_demo_digits() -> tuple[list[ImageSource], list[str]]:
    """Return the validation digits as PNG files, and a list with the class name of each.

    The files are named <class>/<index in scikit-learn's data>.png and sorted by name.
    """
    held_out, files = Digits(None, "val"), {}
    for number, pixels, target in zip(held_out.indices, held_out.pixels, held_out.targets):
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "png")
        files[f"{target}/{number:04}.png"] = content.getvalue()
    images = [ImageSource(name, files[name]) for name in sorted(files)]
    return images, [image.name.split("/")[0] for image in images]
