"""Build the data loaders of a config, divide its datasets, and check their settings.

This code is common to all tasks. Each task passes a function that opens its datasets.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from yacs.config import CfgNode

from vil.data import EXTRAS, file_suffix
from vil.data.dataset import ImageDataset, LoadableDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.splits import divide, group_samples
from vil.data.workers import count_workers
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.extras import require_extra
from vil.utils.lookup import lookup
from vil.utils.machine import gigabytes, total_bytes

if TYPE_CHECKING:
    from vil.engine.distributed import DistInfo

logger = logging.getLogger(__name__)

REPEATS = 3  # augmented copies of an image in repeated augmentation, as in DeiT
FILES_PER_WORKER = 15  # for its process, its queue, and the tensors of two prefetched batches
FILES_PER_IDLE_WORKER = 5  # for its process and its queue


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
    workers = count_workers(cfg.DATALOADER.WORKERS, device, dist.local_ranks)
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


def check_num_classes(cfg: CfgNode, dataset: LoadableDataset, name: str) -> None:
    """Raise ConfigError if DATA.NUM_CLASSES is a number that differs from the dataset's number of
    classes. The value "auto" is always allowed.

    name: name of the dataset in the error message.
    """
    if cfg.DATA.NUM_CLASSES not in ("auto", len(dataset.classes)):
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, but {name} has {len(dataset.classes)} "
            "classes: change DATA.NUM_CLASSES, or use another dataset"
        )


def derived_splits(cfg: CfgNode, name: str) -> list[str]:
    """Return the parts, such as ["train", "val"], into which the training split of a dataset is
    divided.

    name: name of the dataset. Returns [] if the split is not divided. Raises ConfigError if the
    config holds out images that no dataset in DATA.VAL or DATA.TEST would use.
    """
    data = cfg.DATA
    if data.VAL:
        held_out = {
            "val": (data.VAL_FRACTION, "VAL"),
            "test": (data.FOLDS or data.TEST_FRACTION, "TEST"),
        }
    else:
        held_out = {"val": (data.FOLDS or data.VAL_FRACTION, "TEST")}
    splits = []
    for split, key in ((split, key) for split, (amount, key) in held_out.items() if amount):
        shared = set(data[key]) & set(data.TRAIN)
        if not shared:
            raise ConfigError(
                f"{split} images can only be held out from a dataset in both DATA.TRAIN "
                f"({', '.join(data.TRAIN)}) and DATA.{key} ({', '.join(data[key])}): change "
                f"DATA.{key}, or set DATA.VAL_FRACTION, TEST_FRACTION and FOLDS to 0"
            )
        if name in shared:
            splits.append(split)
    return ["train", *splits] if splits else []


def split_indices(cfg: CfgNode, name: str, dataset: ImageDataset) -> dict[str, np.ndarray]:
    """Divide the training split of the dataset `name`. Returns {split: sorted indices}.

    The test images are selected before the validation images, so they do not depend on
    DATA.VAL_FRACTION. Raises DataError if a class has too few groups of images for all splits.
    """
    data, splits = cfg.DATA, derived_splits(cfg, name)
    groups = group_samples(dataset, data.GROUP_BY, name)
    rest, indices = np.arange(len(dataset)), {}
    by_fold = "test" if data.VAL else "val"
    for split in (split for split in ("test", "val") if split in splits):
        key = f"{split.upper()}_FRACTION"
        if data.FOLDS and split == by_fold:
            fractions, held_out = [1 / data.FOLDS] * data.FOLDS, data.FOLD
            what = f"{name}, DATA.FOLDS {data.FOLDS}"
        else:
            fractions, held_out = [1 - data[key], data[key]], 1
            what = f"{name}, DATA.{key} {data[key]}"
        parts = divide(dataset, rest, groups, fractions, data.SPLIT_SEED, what)
        indices[split], rest = rest[parts == held_out], rest[parts != held_out]
    indices["train"] = rest
    counts = ", ".join(f"{len(indices[split])} {split}" for split in splits)
    logger.info("%s: %d images are divided into %s", name, len(dataset), counts)
    return indices


def check_batch_size(cfg: CfgNode, batch_size: int) -> None:
    """Raise ConfigError if a batch of `batch_size` float32 images exceeds this machine's memory."""
    side = cfg.INPUT.IMAGE_SIZE
    if (size := batch_size * cfg.INPUT.CHANNELS * side**2 * 4) > (limit := total_bytes()):
        raise ConfigError(
            f"DATALOADER.BSZ {cfg.DATALOADER.BSZ} and INPUT.IMAGE_SIZE {side}: a batch takes "
            f"{gigabytes(size)}, more than the {gigabytes(limit)} of memory of this machine: lower "
            "one of the two keys"
        )


def check_open_files(workers: int, num_sets: int) -> None:
    """Increase this process's soft limit of open files if the data loaders' workers need more.

    workers: workers per loader. num_sets: number of evaluation sets. Raises ConfigError if the hard
    limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # at most two loaders run at a time, for training and one evaluation set; others are idle
    per_worker = 2 * FILES_PER_WORKER + FILES_PER_IDLE_WORKER * (num_sets - 1)
    needed = len(os.listdir("/dev/fd")) + per_worker * workers
    if workers and needed > soft != resource.RLIM_INFINITY:
        if needed > hard != resource.RLIM_INFINITY:
            raise ConfigError(
                f"DATALOADER.WORKERS {workers} may need {needed} open files, but the limit is "
                f"{hard} (ulimit -Hn): set fewer workers"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
