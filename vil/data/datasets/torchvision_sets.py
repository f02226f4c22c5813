"""CIFAR-10, CIFAR-100 and MNIST, downloaded and read by torchvision.

All pixels are held in memory as one array (150 MB for CIFAR). Files are downloaded only with
download=True.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, MNIST

from vil.data.dataset import ImageDataset, Root, Transform
from vil.utils.cache_dir import hold_lock
from vil.utils.errors import DataError


class TorchvisionSet(ImageDataset):
    """A dataset that torchvision reads. source: class of the dataset in torchvision. folder:
    the folder below root that contains the files."""

    def __init__(
        self,
        source: type[CIFAR10] | type[MNIST],
        folder: str,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        download: bool = False,
    ):
        """Read a split. Raises DataError if its files are missing or corrupt, or a download
        fails."""
        super().__init__(split, transform)
        self.folder = folder
        try:
            if download:
                Path(root).mkdir(parents=True, exist_ok=True)
            with hold_lock(Path(root), ".download.lock") if download else nullcontext():
                data = source(root, train=split == "train", download=download)
        except Exception as error:
            # torchvision has no common exception type for missing, corrupt and unreachable files.
            hint = "; to download it, set download=True (DATA.KWARGS.download True)"
            hint = "" if download else hint
            reason = " ".join(str(error).split()).split(". You can use")[0]
            text = f"{Path(root, folder)} is missing or incomplete: {reason}{hint}"
            raise DataError(text) from error
        self.pixels = np.asarray(data.data)  # (N, H, W, 3) or (N, H, W) uint8
        self.targets = np.asarray(data.targets, np.int64)
        self.classes = list(data.classes)

    def image(self, index: int) -> Image.Image:
        """Return the image as RGB. A gray image gets three equal channels."""
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def sample_name(self, index: int) -> str:
        """Return <folder>/<split>/<index>, such as cifar-10-batches-py/train/17."""
        return f"{self.folder}/{self.split}/{index}"


# 50,000 training and 10,000 test images of 32 x 32 in 10 or 100 classes. A. Krizhevsky, 2009.
Cifar = partial(TorchvisionSet, CIFAR10, CIFAR10.base_folder)
Cifar100 = partial(TorchvisionSet, CIFAR100, CIFAR100.base_folder)
# 60,000 training and 10,000 test gray images of 28 x 28 in 10 classes. Y. LeCun et al., 1998.
Mnist = partial(TorchvisionSet, MNIST, "MNIST/raw")
