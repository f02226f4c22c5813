"""Data loaders of a config, for any task: batch sizes, workers, arguments of data sets.

A task opens its own data sets; what they have in common is checked and loaded here.
"""

from collections.abc import Callable, Iterator, Mapping
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
        repeats=REPEATS if cfg.AUG.REPEATED_AUG else 1,
        **_loader_options(cfg, dist, device, bad_file),
    )


@as_config_error
def build_test_loaders(
    cfg: CfgNode,
    dist: DistInfo,
    device: torch.device,
    open_dataset: Callable[[str], LoadableDataset],
    bad_file: Path | None = None,
    datasets: Mapping[str, LoadableDataset] | None = None,
) -> dict[str, EvalLoader]:
    """Build a loader for each set in DATA.TEST, or in `datasets`, each rank its own part."""
    if datasets is None:
        if len(set(cfg.DATA.TEST)) < len(cfg.DATA.TEST):
            raise ConfigError(f"DATA.TEST names a set twice: {', '.join(cfg.DATA.TEST)}")
        datasets = {name: open_dataset(name) for name in cfg.DATA.TEST}
    options = _loader_options(cfg, dist, device, bad_file)
    options["batch_size"] = -(-cfg.DATALOADER.BSZ // dist.world)
    return {name: EvalLoader(dataset, **options) for name, dataset in datasets.items()}


def _loader_options(
    cfg: CfgNode, dist: DistInfo, device: torch.device, bad_file: Path | None
) -> dict[str, Any]:
    return dict(
        rank=dist.rank,
        world=dist.world,
        bad_file=bad_file,
        workers=cfg.DATALOADER.WORKERS,
        pin_memory=device.type == "cuda",
        max_bad_fraction=cfg.DATA.MAX_BAD_FRACTION,
    )


def check_dataset_arguments(cfg: CfgNode, arguments_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError for an argument in DATA.KWARGS that no set takes by `arguments_of`."""
    sets = list(dict.fromkeys([*cfg.DATA.TRAIN, *cfg.DATA.TEST]))
    names = ", ".join(sets)
    known = {argument: name for name in sets for argument in arguments_of(name)}
    for argument in cfg.DATA.KWARGS:
        if not known:
            why = f"{names} takes no arguments (DATA.KWARGS {{}})"
            raise ConfigError(f"DATA.KWARGS.{argument}: {why}")
        lookup(known, argument, f"argument (DATA.KWARGS) of {names}")


@contextmanager
def dataset_arguments(cfg: CfgNode, name: str, taken: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the DATA.KWARGS that a set takes; a TypeError in the block becomes a ConfigError."""
    try:
        yield {key: value for key, value in cfg.DATA.KWARGS.items() if key in taken}
    except TypeError as error:
        raise ConfigError(f"DATA.KWARGS {dict(cfg.DATA.KWARGS)} for {name}: {error}") from error


def check_num_classes(cfg: CfgNode, dataset: Dataset, name: str) -> None:
    """Raise ConfigError unless the set has DATA.NUM_CLASSES classes."""
    if len(dataset.classes) != cfg.DATA.NUM_CLASSES:
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, "
            f"but {name} has {len(dataset.classes)} classes"
        )
