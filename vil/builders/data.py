"""Data loaders of a config, for any task: batch sizes, workers, arguments of data sets.

A task opens its own data sets; what they have in common is checked and loaded here.
"""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.data.dataset import LoadableDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.distributed import DistInfo
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup

REPEATS = 3  # copies of an image in repeated augmentation, as in the published recipes


@as_config_error
def build_train_loader(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    open_dataset: Callable[[], LoadableDataset],
    bad_file: Path | None = None,
) -> TrainLoader:
    """Build the loader of one rank's training batches.

    A step has DATALOADER.BSZ * OPTIM.ACCUMULATE samples over all ranks.
    """
    size = cfg.DATALOADER.BSZ
    if size % dist.world:
        near = max(size // dist.world, 1) * dist.world
        raise ConfigError(
            f"DATALOADER.BSZ {size} does not divide by the {dist.world} processes; {near} does"
        )
    dataset = open_dataset()
    if len(dataset) < (needed := size * cfg.OPTIM.ACCUMULATE):
        raise ConfigError(
            f"a step takes DATALOADER.BSZ {size} x OPTIM.ACCUMULATE {cfg.OPTIM.ACCUMULATE} "
            f"= {needed} images, and the training set has {len(dataset)}: make them smaller"
        )
    return TrainLoader(
        dataset,
        batch_size=size // dist.world * cfg.OPTIM.ACCUMULATE,
        seed=cfg.SEED,
        rank=dist.rank,
        world=dist.world,
        repeats=REPEATS if cfg.AUG.REPEATED_AUG else 1,
        bad_file=bad_file,
        **_loader_options(cfg, device),
    )


@as_config_error
def build_test_loaders(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    open_dataset: Callable[[str], LoadableDataset],
    bad_file: Path | None = None,
) -> dict[str, EvalLoader]:
    """Build a loader for each set in DATA.TEST, each rank its own part."""
    if len(set(cfg.DATA.TEST)) < len(cfg.DATA.TEST):
        raise ConfigError(f"DATA.TEST names a set twice: {', '.join(cfg.DATA.TEST)}")
    sets = {name: open_dataset(name) for name in cfg.DATA.TEST}
    return {
        name: build_eval_loader(cfg, dist, device, dataset, bad_file)
        for name, dataset in sets.items()
    }


def build_eval_loader(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    dataset: LoadableDataset,
    bad_file: Path | None,
) -> EvalLoader:
    """Build the loader of one rank's part of a test set."""
    return EvalLoader(
        dataset,
        batch_size=-(-cfg.DATALOADER.BSZ // dist.world),
        rank=dist.rank,
        world=dist.world,
        bad_file=bad_file,
        **_loader_options(cfg, device),
    )


def _loader_options(cfg: CfgNode, device: torch.device) -> dict[str, Any]:
    return dict(
        workers=cfg.DATALOADER.WORKERS,
        pin_memory=device.type == "cuda",
        max_bad_fraction=cfg.DATA.MAX_BAD_FRACTION,
    )


def check_dataset_arguments(cfg: CfgNode, arguments_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError for an argument in DATA.KWARGS that no set takes.

    Each set gets the arguments that it takes: `arguments_of` names them.
    """
    sets = list(dict.fromkeys([*cfg.DATA.TRAIN, *cfg.DATA.TEST]))
    names = ", ".join(sets)
    known = {argument: name for name in sets for argument in arguments_of(name)}
    for argument in cfg.DATA.KWARGS:
        if not known:
            raise ConfigError(
                f"DATA.KWARGS.{argument}: {names} takes no arguments (DATA.KWARGS {{}})"
            )
        lookup(known, argument, f"argument (DATA.KWARGS) of {names}")


def dataset_arguments(cfg: CfgNode, taken: list[str]) -> dict[str, Any]:
    """Those of DATA.KWARGS that a set takes."""
    return {key: value for key, value in cfg.DATA.KWARGS.items() if key in taken}


@contextmanager
def refused_arguments(cfg: CfgNode, name: str):
    """Raise ConfigError for a value of DATA.KWARGS whose type the set does not take."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(f"DATA.KWARGS {dict(cfg.DATA.KWARGS)} for {name}: {error}") from error


def check_num_classes(cfg: CfgNode, dataset: Dataset, name: str) -> None:
    """Raise ConfigError unless the set has DATA.NUM_CLASSES classes."""
    if len(dataset.classes) != cfg.DATA.NUM_CLASSES:
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, "
            f"but {name} has {len(dataset.classes)} classes"
        )
