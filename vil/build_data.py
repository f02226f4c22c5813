"""The bridge from a config to data: the other half of `vil.build`."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from yacs.config import CfgNode

from vil import build_detection
from vil.build import refuses
from vil.config import ConfigError
from vil.data import build_dataset, is_numbered, own_arguments
from vil.data.class_mapping import read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.datasets.concat import ConcatImageDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.transforms import eval_transform, train_transform
from vil.engine.distributed import DistInfo
from vil.utils.lookup import lookup

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
REPEATS = 3  # copies of an image in repeated augmentation, as in the published recipes
log = logging.getLogger(__name__)


@refuses
def build_train_loader(
    cfg: CfgNode, ranks: DistInfo, device: torch.device, bad_file: Path | None = None
) -> TrainLoader:
    """The training batches of one rank; a step has DATALOADER.BSZ * OPTIM.ACCUMULATE images over
    all ranks."""
    size = cfg.DATALOADER.BSZ
    if size % ranks.world:
        near = max(size // ranks.world, 1) * ranks.world
        raise ConfigError(
            f"DATALOADER.BSZ {size} does not divide by the {ranks.world} processes; {near} does"
        )
    _check_arguments(cfg)
    transform = build_train_transform(cfg)
    sets = [_dataset(cfg, name, "train", transform) for name in cfg.DATA.TRAIN]
    dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, cfg.DATA.TRAIN)
    _check_classes(cfg, dataset, ", ".join(cfg.DATA.TRAIN))
    if len(dataset) < (needed := size * cfg.OPTIM.ACCUMULATE):
        raise ConfigError(
            f"a step takes DATALOADER.BSZ {size} x OPTIM.ACCUMULATE {cfg.OPTIM.ACCUMULATE} "
            f"= {needed} images, and the training set has {len(dataset)}: make them smaller"
        )
    return TrainLoader(
        dataset,
        batch_size=size // ranks.world * cfg.OPTIM.ACCUMULATE,
        seed=cfg.SEED,
        rank=ranks.rank,
        world=ranks.world,
        repeats=REPEATS if cfg.AUG.REPEATED_AUG else 1,
        bad_file=bad_file,
        **_loading(cfg, device),
    )


@refuses
def build_test_loaders(
    cfg: CfgNode, ranks: DistInfo, device: torch.device, bad_file: Path | None = None
) -> dict[str, EvalLoader]:
    """The test sets by name, each rank its own part."""
    if len(set(cfg.DATA.TEST)) < len(cfg.DATA.TEST):
        raise ConfigError(f"DATA.TEST names a set twice: {', '.join(cfg.DATA.TEST)}")
    _check_arguments(cfg)
    size = -(-cfg.DATALOADER.BSZ // ranks.world)
    transform = build_eval_transform(cfg)
    sets = {name: _dataset(cfg, name, "val", transform) for name in cfg.DATA.TEST}
    for name, dataset in sets.items():
        if not cfg.DATA.TARGETMAP:
            _check_classes(cfg, dataset, name)
    return {
        name: EvalLoader(
            dataset,
            batch_size=size,
            rank=ranks.rank,
            world=ranks.world,
            bad_file=bad_file,
            **_loading(cfg, device),
        )
        for name, dataset in sets.items()
    }


def warn_of_names(learned: Sequence[str], tests: dict[str, EvalLoader]) -> None:
    """Categories of a detector's test set go by their numbers: say so where, by their names, they
    are others than those it learned."""
    for name, test in tests.items():
        pairs = zip(learned, test.classes)
        other = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if other:
            log.warning(
                "the categories of %s are not called as those of training, the first %r there and "
                "%r here: they are matched by the order of their ids",
                name,
                *reversed(other),
            )


@refuses
def build_links(cfg: CfgNode, test_loaders: dict[str, EvalLoader]) -> dict[str, Tensor] | None:
    """Which classes of the model stand for which of each test set (DATA.TARGETMAP), if not 1:1."""
    if not cfg.DATA.TARGETMAP:
        return None
    path = Path(cfg.DATA.PATH, cfg.DATA.TARGETMAP)
    return {
        name: read_class_mapping(path, cfg.DATA.NUM_CLASSES, loader.classes)
        for name, loader in test_loaders.items()
    }


def _loading(cfg: CfgNode, device: torch.device) -> dict[str, Any]:
    return dict(
        workers=cfg.DATALOADER.WORKERS,
        pin_memory=device.type == "cuda",
        max_bad_fraction=cfg.DATA.MAX_BAD_FRACTION,
    )


def _dataset(cfg: CfgNode, name: str, split: str, transform: Callable | None) -> ImageDataset:
    taken = _arguments(cfg, name)
    own = {key: value for key, value in cfg.DATA.KWARGS.items() if key in taken}
    try:
        if cfg.DETECTION.MODEL:
            return build_detection.dataset(cfg, name, split, transform, own)
        if is_numbered(name) and not (split == "val" and cfg.DATA.TARGETMAP):
            own.setdefault("num_classes", cfg.DATA.NUM_CLASSES)
        return build_dataset(name, cfg.DATA.PATH, split, transform, **own)
    except TypeError as error:  # of a type that the dataset does not take
        raise ConfigError(f"DATA.KWARGS {dict(cfg.DATA.KWARGS)} for {name}: {error}") from error


def _arguments(cfg: CfgNode, name: str) -> list[str]:
    """What a set takes from DATA.KWARGS."""
    if cfg.DETECTION.MODEL:
        return build_detection.own_arguments(name)
    return own_arguments(name)


def _check_arguments(cfg: CfgNode) -> None:
    """Each set gets those of DATA.KWARGS that it takes; one that no set takes is a mistake."""
    names = ", ".join(_sets(cfg))
    known = {argument: name for name in _sets(cfg) for argument in _arguments(cfg, name)}
    for argument in cfg.DATA.KWARGS:
        if not known:
            raise ConfigError(
                f"DATA.KWARGS.{argument}: {names} takes no arguments (DATA.KWARGS {{}})"
            )
        lookup(known, argument, f"argument (DATA.KWARGS) of {names}")


def _sets(cfg: CfgNode) -> list[str]:
    """The names in DATA.TRAIN and DATA.TEST, each once."""
    return list(dict.fromkeys([*cfg.DATA.TRAIN, *cfg.DATA.TEST]))


def _check_classes(cfg: CfgNode, dataset: ImageDataset, name: str) -> None:
    if len(dataset.classes) != cfg.DATA.NUM_CLASSES:
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, "
            f"but {name} has {len(dataset.classes)} classes"
        )


def _normalisation(cfg: CfgNode) -> dict[str, Any]:
    return dict(
        mean=cfg.INPUT.MEAN,
        std=cfg.INPUT.STD,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )


@refuses
def build_train_transform(cfg: CfgNode) -> Callable:
    """From a training picture to an augmented tensor; with DETECTION.MODEL, with its boxes."""
    if cfg.DETECTION.MODEL:
        return build_detection.transform_for_training(cfg)
    timm, aug = cfg.AUG.TIMM_AUG, cfg.AUG
    by_timm = dict(
        use_timm=True,
        hflip=timm.HFLIP,
        vflip=timm.VFLIP,
        color_jitter=timm.COLOR_JITTER,
        auto_augment=timm.AUTO_AUGMENT or None,
        re_prob=timm.RE_PROB,
        re_mode=timm.RE_MODE,
        re_count=timm.RE_COUNT,
    )
    plain = dict(
        finetune=cfg.FINETUNE.FINETUNE and not cfg.FINETUNE.USE_TRAIN_AUG,
        crop_pct=cfg.INPUT.CROP_PCT,
        color_jitter=aug.COLOR_JITTER,
        gray_scale=aug.GRAY_SCALE,
        gaussian_blur=aug.GAUSSIAN_BLUR,
    )
    return train_transform(
        cfg.INPUT.IMAGE_SIZE,
        scale=tuple(aug.SCALE),
        ratio=tuple(aug.RATIO),
        **_normalisation(cfg),
        **(by_timm if timm.USE_TRANSFORM else plain),
    )


@refuses
def build_eval_transform(cfg: CfgNode) -> Callable | None:
    """From a picture to the tensor that is evaluated; a detector has its own, for all sizes."""
    if cfg.DETECTION.MODEL:
        return None
    return eval_transform(cfg.INPUT.IMAGE_SIZE, crop_pct=cfg.INPUT.CROP_PCT, **_normalisation(cfg))
