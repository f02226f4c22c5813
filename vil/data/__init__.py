"""Datasets, transforms and loaders. Everything takes explicit arguments; importing this package
does not import torch.

datasets    DATASETS below: one file each, subclasses of ImageDataset (`dataset.py`)
formats     zip, tar and TSV files, read in place by any number of processes
synthetic   rendered scenes for object detection
transforms  PIL image -> normalized tensor
samplers    the order of the samples, and the random numbers that each sample gets
loader      TrainLoader and EvalLoader, which yield a `Batch` (batch.py)
mixup       Mix: Mixup and CutMix of a batch on the model's device
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vil.utils.lazy import lazy_exports
from vil.utils.registry import Entry, Registry

if TYPE_CHECKING:
    from vil.data.dataset import ImageDataset

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ImageDataset": "vil.data.dataset",
        "TrainLoader": "vil.data.loader",
        "EvalLoader": "vil.data.loader",
    },
)
__all__ += ["DATASETS", "build_dataset", "is_numbered", "own_arguments", "register_dataset"]


DatasetType = Callable[..., "ImageDataset"]  # dataset(root, split, transform, **own)


def check_dataset(dataset: DatasetType, entry: Entry) -> None:
    """Raise ValueError if a dataset has other arguments or misses methods of ImageDataset."""
    name = entry.name
    if not callable(dataset):
        raise ValueError(f"dataset {name!r} must be a class or a function, given {dataset!r}")
    parameters = inspect.signature(dataset).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 3 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ValueError(
            f"dataset {name!r} is called as f(root, split, transform, **own): it must take these "
            "three, and its own arguments by keyword only, each by name; given "
            f"{inspect.signature(dataset)}"
        )
    if entry.facts.get("numbered") and "num_classes" not in keyword_only(dataset):
        raise ValueError(f"dataset {name!r} is numbered: it must take num_classes by keyword")
    if not inspect.isclass(dataset):
        return
    from vil.data.dataset import ImageDataset

    subject = f"dataset {name!r}: {dataset.__name__}"
    if not issubclass(dataset, ImageDataset):
        raise ValueError(f"{subject} must subclass vil.data.ImageDataset")
    if missing := sorted(dataset.__abstractmethods__):
        raise ValueError(f"{subject} must define {', '.join(missing)}")


# A `numbered` dataset has plain numbers for labels and takes num_classes: how many there are.
DATASETS = Registry("dataset", check=check_dataset)
ZIP_OR_FOLDER = "a zip and a list of labels per split, else a folder per class"
DATASETS.add("digits", "vil.data.datasets.digits:Digits", "1,797 scanned digits of scikit-learn")
DATASETS.add("folder", "vil.data.datasets.folder:Folder", "a folder per class")
DATASETS.add("imagenet", "vil.data.formats.imagenet_zip:imagenet", ZIP_OR_FOLDER, numbered=True)
DATASETS.add("tar", "vil.data.formats.tar:Tar", "a tar per split with a folder per class")
DATASETS.add("tsv", "vil.data.formats.tsv:Tsv", "base64 images in TSV rows", numbered=True)
DATASETS.add("cifar", "vil.data.datasets.torchvision_sets:Cifar", "CIFAR-10")
DATASETS.add("cifar100", "vil.data.datasets.torchvision_sets:Cifar100", "CIFAR-100")
DATASETS.add("mnist", "vil.data.datasets.torchvision_sets:Mnist", "MNIST")
DATASETS.add("fake", "vil.data.datasets.fake:Fake", "generated images, for tests and benchmarks")


def register_dataset(
    name: str, dataset: DatasetType | str, *, about: str = "", numbered: bool = False
) -> None:
    """Add a dataset for DATA.TRAIN and DATA.TEST: a subclass of ImageDataset, a function that
    returns one, or the "module:attribute" of either, which is imported when it is first used.

    It is called as dataset(root, split, transform, **own), where `own` are the values in
    DATA.KWARGS for its keyword-only arguments. numbered: labels are plain numbers, and the dataset
    takes `num_classes`. Raises ValueError for a name that is taken and for another signature.
    """
    if name.endswith(".yaml"):
        raise ValueError(f"dataset {name!r}: names that end in .yaml are TSV files")
    DATASETS.register(name, dataset, about, numbered=numbered)


def build_dataset(
    name: str, root: str | Path, split: str, transform: Callable | None = None, **own: Any
) -> "ImageDataset":
    """Build the `split` ("train" or "val") of the dataset `name`, with its own arguments.

    A name that ends in .yaml is a TSV dataset: the path of that file below root, for both splits.
    """
    from vil.data.dataset import ImageDataset

    if name.endswith(".yaml"):
        own = {"yaml": name, **own}
    dataset = DATASETS.load(registered_name(name))(root, split, transform, **own)
    if not isinstance(dataset, ImageDataset):
        given = type(dataset).__name__
        raise ValueError(f"dataset {name!r} must return a vil.data.ImageDataset, not {given}")
    return dataset


def is_numbered(name: str) -> bool:
    """Whether the dataset takes num_classes and checks its labels against it."""
    return DATASETS.entry(registered_name(name)).facts.get("numbered", False)


def own_arguments(name: str) -> list[str]:
    """The arguments that a dataset takes besides root, split and transform."""
    return keyword_only(DATASETS.load(registered_name(name)))


def keyword_only(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def registered_name(name: str) -> str:
    """Return `name`, or "tsv" for the path of a yaml file: the name in DATASETS."""
    return "tsv" if name.endswith(".yaml") else name
