"""Build the data loaders of a config, and check the config's dataset settings.

This code is common to all tasks. Each task passes a function that opens its datasets.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.builders.limits import check_batch_size, check_open_files
from vil.data import EXTRAS, file_suffix
from vil.data.dataset import LoadableDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.workers import count_workers
from vil.engine.distributed import DistInfo, local_ranks
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.extras import require_extra
from vil.utils.lookup import lookup

REPEATS = 3  # augmented copies of an image in repeated augmentation, as in DeiT


@as_config_error
def build_train_loader(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    open_dataset: Callable[[], LoadableDataset],
    bad_file: Path | None = None,
) -> TrainLoader:
    """Build this rank's training loader, which yields one batch per optimizer step.

    The batches of all ranks together have DATALOADER.BSZ * OPTIM.ACCUMULATE samples.
    open_dataset: function that returns the training set. bad_file: text file to which the names of
    unreadable images are appended.
    """
    size = cfg.DATALOADER.BSZ
    if size % dist.world:
        near = max(size // dist.world, 1) * dist.world
        raise ConfigError(
            f"DATALOADER.BSZ {size} is not divisible by the number of processes, {dist.world}: set "
            f"DATALOADER.BSZ to {near}, for example"
        )
    dataset = open_dataset()
    if len(dataset) < (needed := size * cfg.OPTIM.ACCUMULATE):
        raise ConfigError(
            f"a step takes DATALOADER.BSZ {size} x OPTIM.ACCUMULATE {cfg.OPTIM.ACCUMULATE} "
            f"= {needed} images, but the training set has {len(dataset)}: lower one of the two keys"
        )
    return TrainLoader(
        dataset,
        batch_size=size // dist.world * cfg.OPTIM.ACCUMULATE,
        seed=cfg.SEED,
        repeats=REPEATS if cfg.AUG.REPEATED_AUG else 1,
        balanced=is_balanced(cfg, dataset),
        **_loader_options(cfg, dist, device, bad_file),
    )


def is_balanced(cfg: CfgNode, dataset: LoadableDataset) -> bool:
    """Return whether DATALOADER.SAMPLER is "balanced". Raises ConfigError if it is "balanced" but
    the dataset does not have exactly one class per image."""
    if cfg.DATALOADER.SAMPLER == "random":
        return False
    if getattr(dataset, "target_type", None) != "class":
        raise ConfigError(
            "DATALOADER.SAMPLER 'balanced' needs a dataset with one class per image: use 'random'"
        )
    return True


@as_config_error
def build_test_loaders(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    open_dataset: Callable[[str], LoadableDataset],
    bad_file: Path | None = None,
    datasets: Mapping[str, LoadableDataset] | None = None,
    *,
    max_batch: int | None = None,
    key: str = "TEST",
) -> dict[str, EvalLoader]:
    """Build {name: loader} for the test sets. Each loader yields this rank's share of the images.

    bad_file: text file to which the names of unreadable images are appended.
    datasets: {name: dataset}. By default, `open_dataset` is called with each name in DATA.TEST, or
    in DATA.VAL if `key` is "VAL".
    max_batch: if given, the batch size of a rank is min(max_batch, DATALOADER.BSZ). By default, the
    ranks divide DATALOADER.BSZ among them.
    """
    if datasets is None:
        names = cfg.DATA[key]
        if len(set(names)) < len(names):
            raise ConfigError(f"DATA.{key} names a dataset twice: {', '.join(names)}")
        datasets = {name: open_dataset(name) for name in names}
    options = _loader_options(cfg, dist, device, bad_file)
    size = cfg.DATALOADER.BSZ
    options["batch_size"] = min(size, max_batch) if max_batch else -(-size // dist.world)
    return {name: EvalLoader(dataset, **options) for name, dataset in datasets.items()}


def _loader_options(
    cfg: CfgNode, dist: DistInfo, device: torch.device, bad_file: Path | None
) -> dict[str, Any]:
    check_batch_size(cfg, -(-cfg.DATALOADER.BSZ // dist.world))
    workers = count_workers(cfg.DATALOADER.WORKERS, device, local_ranks(dist))
    check_open_files(workers, len(cfg.DATA.VAL) + len(cfg.DATA.TEST))
    return dict(
        rank=dist.rank,
        world=dist.world,
        bad_file=bad_file,
        workers=workers,
        pin_memory=device.type == "cuda",
        max_bad_fraction=cfg.DATA.MAX_BAD_FRACTION,
    )


def check_extras(cfg: CfgNode) -> None:
    """Raise DataError if a dataset of the config needs a package that is not installed.

    Call this before the model is built. It checks the names of the datasets and does not open them.
    """
    for name in dict.fromkeys([*cfg.DATA.TRAIN, *cfg.DATA.VAL, *cfg.DATA.TEST]):
        if extra := EXTRAS.get(file_suffix(name) or name):
            require_extra(extra, f"the dataset {name}")


def check_dataset_arguments(cfg: CfgNode, arguments_of: Callable[[str], list[str]]) -> None:
    """Raise ValueError if DATA.KWARGS has a key that no dataset in DATA.TRAIN, DATA.VAL or
    DATA.TEST accepts.

    arguments_of: function that returns the argument names that the dataset of a given name accepts.
    """
    sets = list(dict.fromkeys([*cfg.DATA.TRAIN, *cfg.DATA.VAL, *cfg.DATA.TEST]))
    names = ", ".join(sets)
    known = {argument: name for name in sets for argument in arguments_of(name)}
    for argument in cfg.DATA.KWARGS:
        if not known:
            why = f"{names} takes no arguments: leave DATA.KWARGS empty"
            raise ConfigError(f"DATA.KWARGS.{argument}: {why}")
        lookup(known, argument, f"argument (DATA.KWARGS) of {names}")


@contextmanager
def dataset_arguments(cfg: CfgNode, name: str, taken: list[str]) -> Iterator[dict[str, Any]]:
    """Context manager that yields the items of DATA.KWARGS that the dataset `name` accepts, as a
    dict.

    Build the dataset inside the `with` block, so that a TypeError is raised as a ConfigError.
    taken: names of the arguments that the dataset accepts.
    """
    try:
        yield {key: value for key, value in cfg.DATA.KWARGS.items() if key in taken}
    except TypeError as error:
        text = f"the dataset {name} cannot be built with DATA.KWARGS {dict(cfg.DATA.KWARGS)}"
        raise ConfigError(f"{text}: {error}") from error


def check_num_classes(cfg: CfgNode, dataset: Dataset, name: str) -> None:
    """Raise ConfigError if DATA.NUM_CLASSES is a number that differs from the dataset's number of
    classes. The value "auto" is always allowed.

    name: name of the dataset in the error message.
    """
    if cfg.DATA.NUM_CLASSES not in ("auto", len(dataset.classes)):
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, but {name} has {len(dataset.classes)} "
            "classes: change DATA.NUM_CLASSES, or use another dataset"
        )
