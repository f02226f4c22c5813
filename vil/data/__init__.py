"""Data: from files to seeded batches. Everything here takes explicit arguments.

datasets    DATASETS below: one file each, all of the shape described in `dataset.py`
archives    archive.py (zip, tar), tsv_file.py: read in place, by any number of processes
joined      several datasets as one; target_map: a dataset labelled unlike the model
transforms  picture -> normalised tensor
samplers    which sample comes when; seeding: which random numbers it gets
loader      TrainLoader and EvalLoader, which give the Batch of `batch.py`
mixup       Mix, applied to a batch where the model is
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from vil.data.dataset import ImageDataset
from vil.data.datasets.digits import Digits
from vil.data.datasets.fake import Fake
from vil.data.datasets.folder import Folder
from vil.data.datasets.torchvision_sets import Cifar, Cifar100, Mnist
from vil.data.formats.imagenet_zip import imagenet
from vil.data.formats.tar import Tar
from vil.data.formats.tsv import Tsv
from vil.utils.lookup import lookup

# Each row is called as f(root, split, transform, **own). A row that is `numbered` finds numbers
# for labels and takes num_classes: how many there are.
DATASETS = {
    "digits": Digits,
    "folder": Folder,
    "imagenet": imagenet,
    "tar": Tar,
    "tsv": Tsv,
    "cifar": Cifar,
    "cifar100": Cifar100,
    "mnist": Mnist,
    "fake": Fake,
}


def build_dataset(
    name: str, root: str | Path, split: str, transform: Callable | None = None, **own
) -> ImageDataset:
    """The `split` ("train" or "val") of a dataset of the table; `own` goes to it untouched.

    A name that ends in .yaml is the TSV set of that file below root, whatever the split.
    """
    if name.endswith(".yaml"):
        own = {"yaml": name, **own}
    return dataset_row(name)(root, split, transform, **own)


def is_numbered(name: str) -> bool:
    """Whether build_dataset takes num_classes for this name, and checks the labels against it."""
    return dataset_row(name).numbered


def own_arguments(name: str) -> list[str]:
    """What a dataset takes besides root, split and transform."""
    parameters = inspect.signature(dataset_row(name)).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def dataset_row(name: str) -> Callable[..., ImageDataset]:
    """The row of DATASETS for a name. ValueError with the choices."""
    return lookup(DATASETS, "tsv" if name.endswith(".yaml") else name, "dataset")
