"""Data: from a folder of pictures to seeded batches. Everything here takes explicit arguments.

datasets    DATASETS below: one file each, all of the shape described in `dataset.py`
transforms  picture -> normalised tensor
samplers    which sample comes when; seeding: which random numbers it gets
loader      TrainLoader and EvalLoader, which give the Batch of `batch.py`
mixup       Mix, applied to a batch where the model is
"""

from collections.abc import Callable
from pathlib import Path

from vil.data.dataset import ImageDataset
from vil.data.digits import Digits
from vil.data.fake import Fake
from vil.data.folder import Folder
from vil.utils.table import lookup

# Each row is called as f(root, split, transform, **own). ImageNet unpacked is a folder of images
# like any other; its archives of the 2021 reference are not read yet.
DATASETS = {"digits": Digits, "folder": Folder, "imagenet": Folder, "fake": Fake}


def build_dataset(
    name: str, root: str | Path, split: str, transform: Callable | None = None, **own
) -> ImageDataset:
    """The `split` ("train" or "val") of a dataset of the table; `own` goes to it untouched."""
    return lookup(DATASETS, name, "dataset")(root, split, transform, **own)
