"""Datasets, transforms and loaders. Nothing here reads the config: all settings are arguments.
Importing this package does not import torch.

dataset     ImageDataset, the base class of datasets; DATASETS below lists its subclasses
datasets    folders, tables, generated images, and datasets made of others
formats     zip, tar and TSV files, read in place by any number of processes
synthetic   rendered scenes for object detection
transforms  PIL image -> normalized tensor
samplers    sample order, and the seeds of random augmentation
loader      TrainLoader and EvalLoader, which yield a `Batch` (batch.py)
mixup       Mix: Mixup and CutMix of a batch on the model's device
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vil.utils.extras import Extra
from vil.utils.lazy import lazy_exports
from vil.utils.registry import Entry, Key, Registry

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
__all__ += ["TRANSFORMS", "register_transform"]


DatasetType = Callable[..., "ImageDataset"]  # dataset(root, split, transform, **own)


def check_dataset(dataset: object, entry: Entry) -> None:
    """Raise ValueError if a dataset breaks the contract of `register_dataset`.

    A dataset must take exactly three positional arguments: root, split and transform. All others
    must be keyword-only. A class must also subclass ImageDataset and define its abstract methods.
    """
    name = entry.name
    if not callable(dataset):
        raise ValueError(f"dataset {name!r} must be a class or a function, got {dataset!r}")
    parameters = inspect.signature(dataset).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 3 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ValueError(
            f"dataset {name!r} must take exactly three positional arguments (root, split, "
            "transform), followed only by keyword-only arguments, without *args or **kwargs; its "
            f"signature is {inspect.signature(dataset)}"
        )
    if entry.facts.get("numbered") and "num_classes" not in keyword_only(dataset):
        raise ValueError(
            f"dataset {name!r} is registered with numbered=True, so it must have the keyword-only "
            "argument num_classes"
        )
    if not inspect.isclass(dataset):
        return
    from vil.data.dataset import ImageDataset

    subject = f"dataset {name!r}: {dataset.__name__}"
    if not issubclass(dataset, ImageDataset):
        raise ValueError(f"{subject} must subclass vil.data.ImageDataset")
    if missing := sorted(dataset.__abstractmethods__):
        raise ValueError(f"{subject} must define {', '.join(missing)}")


# numbered: the labels are integers without names, and the dataset takes `num_classes`.
DATASETS = Registry("dataset", check=check_dataset)
ZIP_OR_FOLDER = "a zip and a list of labels per split, else a folder per class"
DATASETS.add("digits", "vil.data.datasets.digits:Digits", "1,797 scanned digits of scikit-learn")
_DIGIT_TARGETS = "vil.data.datasets.digit_targets"
DATASETS.add("digit_angles", f"{_DIGIT_TARGETS}:DigitAngles", "rotated digits, for regression")
DATASETS.add("digit_sets", f"{_DIGIT_TARGETS}:DigitSets", "scenes of several digits, multilabel")
DATASETS.add("folder", "vil.data.datasets.folder:Folder", "a folder per class")
DATASETS.add("images", "vil.data.datasets.images:Images", "any images, without labels")
DATASETS.add("imagenet", "vil.data.formats.imagenet_zip:imagenet", ZIP_OR_FOLDER, numbered=True)
DATASETS.add("tar", "vil.data.formats.tar:Tar", "a tar per split with a folder per class")
DATASETS.add("tsv", "vil.data.formats.tsv:Tsv", "base64 images in TSV rows", numbered=True)
DATASETS.add("table", "vil.data.datasets.table:Table", "a CSV, TSV or Parquet file of images")
DATASETS.add("shards", "vil.data.formats.shards:Shards", "tars of images and labels (webdataset)")
DATASETS.add("hf", "vil.data.datasets.hf:HuggingFace", "a folder of the library `datasets`")
DATASETS.add("cifar", "vil.data.datasets.torchvision_sets:Cifar", "CIFAR-10")
DATASETS.add("cifar100", "vil.data.datasets.torchvision_sets:Cifar100", "CIFAR-100")
DATASETS.add("mnist", "vil.data.datasets.torchvision_sets:Mnist", "MNIST")
DATASETS.add("fake", "vil.data.datasets.fake:Fake", "generated images, for tests and benchmarks")

# {end of a name that is a path: (dataset in DATASETS, its argument that takes the path)}
FILES = {
    ".yaml": ("tsv", "yaml"),
    ".csv": ("table", "file"),
    ".tsv": ("table", "file"),
    ".parquet": ("table", "file"),
    "/": ("hf", "folder"),
    ".tar": ("shards", "files"),
}
# {end in FILES, or name in DATASETS: the optional package that reads these files}
EXTRAS = {".parquet": Extra("pyarrow", "tables")}
EXTRAS |= dict.fromkeys(["/", "hf"], Extra("datasets", "hf"))


def register_dataset(
    name: str, dataset: DatasetType | str, *, about: str = "", numbered: bool = False
) -> None:
    """Register a dataset under a name, for use in DATA.TRAIN and DATA.TEST.

    Args:
        dataset: a subclass of ImageDataset, or a function that returns an instance of one. Can also
            be the location "module:attribute" of the class or function, which is then imported at
            first use. The class or function is called as dataset(root, split, transform, **kwargs).
            kwargs are those items of DATA.KWARGS that are keyword-only arguments of the dataset.
        about: one-line description, shown in lists of datasets.
        numbered: whether the labels are integers without class names. The dataset must then have
            the keyword-only argument `num_classes`.

    Raises ValueError if the name is taken, if it ends in a file suffix of FILES, such as ".csv", or
    if the dataset does not meet the requirements above.
    """
    if suffix := file_suffix(name):
        raise ValueError(
            f"dataset {name!r}: a name that ends in {suffix!r} is read as the path of a data set: "
            "choose another name"
        )
    DATASETS.register(name, dataset, about, numbered=numbered)


def check_transform(build: Callable, entry: Entry) -> None:
    """Raise ValueError if `build` cannot be called as `register_transform` says, or if it is an
    object that is a transform itself."""
    call = f"build({', '.join(f'{argument}=...' for argument in entry.keys)})"
    expected = f"transform {entry.name!r} must be a function or class that returns the transform"
    if not (inspect.isclass(build) or inspect.isroutine(build) or isinstance(build, partial)):
        raise ValueError(f"{expected}, such as lambda: ..., got {build!r:.80}")
    try:
        inspect.signature(build).bind(**dict.fromkeys(entry.keys))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected} and can be called as {call}: {error}") from error


TRANSFORMS = Registry("transform", check=check_transform)


def register_transform(
    name: str,
    build: Callable[..., Callable] | str,
    *,
    keys: Mapping[str, str | Key] | None = None,
    about: str = "",
) -> None:
    """Register a transform of training images under a name for the config key AUG.TRANSFORM.

    build: a function or class build(**arguments) that returns the transform, or its location as a
    string "module:attribute", which is imported at first use. The transform is any function of an
    RGB PIL image (S, S) that returns such an image. It may draw from the global random generators
    of `random`, numpy and torch, which are seeded for each image, and from no others.
    keys: {keyword argument of `build`: config key that sets it}.
    about: one-line description for lists of transforms.

    Raises ValueError if the name is taken or if `build` cannot be called as above. The transform
    itself is tried at the start of a run, see `vil.data.transforms.build_transform`.
    """
    TRANSFORMS.register(name, build, about, keys=keys)


def build_dataset(
    name: str, root: str | Path, split: str, transform: Callable | None = None, **own: Any
) -> "ImageDataset":
    """Build the split "train", "val" or "test" of a dataset.

    name: a registered name, or a path below root that ends in a suffix of FILES, such as the file
    "x.csv" or the folder "x/". If it is a .yaml file, every split has the same images. own:
    arguments of the dataset, see `own_arguments`. Raises ValueError if the result is not an
    ImageDataset.
    """
    from vil.data.dataset import ImageDataset

    if suffix := file_suffix(name):
        own = {FILES[suffix][1]: name, **own}
    dataset = DATASETS.load(registered_name(name))(root, split, transform, **own)
    if not isinstance(dataset, ImageDataset):
        given = type(dataset).__name__
        raise ValueError(f"dataset {name!r} must return a vil.data.ImageDataset, not {given}")
    return dataset


def is_numbered(name: str) -> bool:
    """Return whether a dataset, given by name, has integer labels without class names. Such a
    dataset takes the argument `num_classes`."""
    return DATASETS.entry(registered_name(name)).facts.get("numbered", False)


def own_arguments(name: str) -> list[str]:
    """Return the names of the arguments that a dataset, given by name, takes in addition to root,
    split and transform."""
    return keyword_only(DATASETS.load(registered_name(name)))


def takes_list(argument: str) -> bool:
    """Return whether a dataset argument, such as "label_columns", takes a list. It does if its
    default is a list or tuple in any registered dataset."""
    functions = (DATASETS.load(name) for name in DATASETS.entries)
    parameters = (inspect.signature(each).parameters.get(argument) for each in functions)
    return any(isinstance(getattr(p, "default", None), list | tuple) for p in parameters)


def keyword_only(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def registered_name(name: str) -> str:
    """Return the registered name of a dataset.

    name: a registered name, which is returned unchanged, or a path such as "x.csv". For a path,
    FILES maps the suffix to the registered name.
    """
    suffix = file_suffix(name)
    return FILES[suffix][0] if suffix else name


def find_source(name: str) -> tuple[str, str]:
    """Return a dataset's name in DATASETS and its path, "" for none. They are the same for two
    names of one source, such as "table", "labels.csv" and "./labels.csv"."""
    registered = registered_name(name)
    argument = dict(FILES.values()).get(registered)
    if argument is None:
        return registered, ""
    default = inspect.signature(DATASETS.load(registered)).parameters[argument].default
    return registered, os.path.normpath(name if registered != name else str(default))


def file_suffix(name: str) -> str:
    """Return the file suffix of a dataset's name, such as ".csv", if FILES lists it, else ""."""
    return next((suffix for suffix in FILES if name.lower().endswith(suffix)), "")
