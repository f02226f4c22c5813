"""CIFAR-10, CIFAR-100 and MNIST, stored and read by torchvision; transforms are ours alone.

Their pixels are held in memory as one buffer (150 MB for CIFAR). They are only fetched from the
network when asked for with download=True.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, MNIST, VisionDataset

from vil.data.dataset import ImageDataset
from vil.utils.errors import DataError


class TorchvisionSet(ImageDataset):
    """What torchvision's class `source` has in a folder below root; val is its test set."""

    source: type[VisionDataset]
    place: str

    def __init__(
        self,
        root: str | Path,
        split: str,
        transform: Callable | None = None,
        *,
        download: bool = False,
    ):
        """DataError when it is not there, damaged, or cannot be fetched."""
        super().__init__(split, transform)
        found = self.open(Path(root), download)
        self.pixels = np.asarray(found.data)  # (N, H, W, 3) or (N, H, W) uint8
        self.targets = np.asarray(found.targets, np.int64)
        self.classes = list(found.classes)

    def open(self, root: Path, download: bool) -> VisionDataset:
        """torchvision's dataset."""
        try:
            with one_at_a_time(root) if download else nullcontext():
                return self.source(root, train=self.split == "train", download=download)
        except Exception as error:
            # Missing, damaged and unreachable have no common type in torchvision.
            hint = "" if download else "; download=True fetches it (DATA.KWARGS.download True)"
            reason = " ".join(str(error).split()).split(". You can use")[0]
            raise DataError(f"no whole {root / self.place}: {reason}{hint}") from error

    def image(self, index: int) -> Image.Image:
        """The picture; a grey one has three equal channels."""
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def sample_name(self, index: int) -> str:
        """Folder, split and number: cifar-10-batches-py/train/17."""
        return f"{self.place}/{self.split}/{index}"


class Cifar(TorchvisionSet):
    """10 classes, 50,000 and 10,000 pictures of 32 x 32. A. Krizhevsky, 2009."""

    source, place = CIFAR10, CIFAR10.base_folder


class Cifar100(TorchvisionSet):
    """The same with 100 classes."""

    source, place = CIFAR100, CIFAR100.base_folder


class Mnist(TorchvisionSet):
    """10 digits, 60,000 and 10,000 grey pictures of 28 x 28. Y. LeCun et al., 1998."""

    source, place = MNIST, "MNIST/raw"


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Processes of a job that would all download into root: the first does, the others wait."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".download.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
