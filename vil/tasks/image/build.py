"""Build the parts of the image tasks from a config: targets, transforms, datasets, mixup."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.config.access import own_settings, warn_unused
from vil.data import build as data
from vil.data import build_dataset, is_numbered, own_arguments
from vil.data.bands import PIL_CHANNELS
from vil.data.build import derived_splits, split_indices
from vil.data.classes import add_learned_classes, match_classes, read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.datasets.composed import ConcatImageDataset, Subset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.data.pixels import loader_transform
from vil.data.transforms import eval_transform, train_transform
from vil.engine.distributed import DistInfo
from vil.integrations.build import build_network
from vil.pretrained.load_weights import Report, load_weights
from vil.tasks.base import Datasets
from vil.tasks.image import LOSSES
from vil.tasks.image.class_metrics import metric_names
from vil.tasks.image.classes import Classes
from vil.tasks.image.labels import Labels
from vil.tasks.image.losses import LossFunction, build_loss
from vil.tasks.image.numbers import Numbers
from vil.tasks.image.target import Target
from vil.tasks.image.task import ImageTask
from vil.utils.errors import ConfigError, DataError, as_config_error
from vil.utils.safe_files import path_below

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
# {whether timm's transform is used: keys of augmentations that are applied to RGB images only}
RGB_ONLY = {
    True: ("AUG.TIMM_AUG.COLOR_JITTER", "AUG.TIMM_AUG.AUTO_AUGMENT"),
    False: ("AUG.COLOR_JITTER", "AUG.GRAY_SCALE", "AUG.GAUSSIAN_BLUR"),
}
# Keys in AUG.TIMM_AUG that set arguments of `train_transform`.
TIMM_KEYS = ("HFLIP", "VFLIP", "COLOR_JITTER", "RE_PROB", "RE_MODE", "RE_COUNT", "AUTO_AUGMENT")
SYNTHETIC = "fake"  # dataset for `ImageBuilder.synthetic`
# {`ImageDataset.target_type`: description of the targets in messages}
TARGETS = {"class": "one class", "labels": "a set of labels", "numbers": "numbers"}
UNUSED = {  # config keys and sections that a task does not use
    "multilabel": ("LOSS.LOSS", "LOSS.FOCAL", "LOSS.LOGIT_ADJUSTMENT", "DATA.TARGETMAP"),
    "regression": ("LOSS", "DATA.TARGETMAP"),
}


# ---- tasks


class Classification(ImageTask):
    """Classification of images with one class each, built from a config."""

    kind = Classes
    output_formats = Classes.formats
    complete_formats = ("probabilities",)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(**_settings(cfg, device, build_classes(cfg, device)))
        check_class_metric(cfg, self.metric.name)

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        mix = build_mix(self.cfg)
        self.target.mix = mix and partial(mix, rank=dist.rank)
        return super().train_loader(dist, **options)

    @as_config_error
    def test_loaders(
        self, dist: DistInfo, *, datasets: Datasets = None, **options: Any
    ) -> dict[str, EvalLoader]:
        loaders = super().test_loaders(dist, datasets=datasets, **options)
        if datasets is None and self.cfg.DATA.TARGETMAP:
            self.target.set_class_mapping(read_class_mappings(self.cfg, loaders))
        return loaders

    def limit_classes(self, top: int | None = 5, threshold: float = 0.0) -> None:
        self.target.top, self.target.threshold = top, threshold


class Multilabel(ImageTask):
    """Multilabel classification: any number of labels per image, built from a config."""

    kind = Labels
    output_formats = Labels.formats
    predicts_classes = False

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(**_settings(cfg, device, build_labels(cfg, device)))


class Regression(ImageTask):
    """Regression: one or more numbers per image, built from a config."""

    kind = Numbers
    output_formats = Numbers.formats
    predicts_classes = False
    learned_keys = ("REGRESSION.MEAN", "REGRESSION.STD")

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(**_settings(cfg, device, build_numbers(cfg, device)))


def _settings(cfg: CfgNode, device: torch.device, target: Target) -> dict[str, Any]:
    """Return the arguments of `ImageTask`. target: built from the same config."""
    return dict(
        target=target,
        builder=ImageBuilder(cfg, target.target_type),
        cfg=cfg,
        device=device,
        transform=build_eval_transform(cfg),
        crop_transform=build_eval_transform(cfg, crop_pct=1.0),
    )


# ---- targets


@as_config_error
def build_classes(cfg: CfgNode, device: torch.device) -> Classes:
    """Build the targets of classification."""
    loss = cfg.LOSS
    return Classes(
        cfg.DATA.NUM_CLASSES,
        device=device,
        loss=_build_class_loss(cfg),
        label_smoothing=loss.LABEL_SMOOTHING,
        per_class=cfg.OUTPUT_PERCLASS_ACC,
        weight_setting=loss.CLASS_WEIGHTS,
        logit_adjustment=loss.LOGIT_ADJUSTMENT,
    )


def _build_class_loss(cfg: CfgNode) -> LossFunction:
    for name, entry in LOSSES.items():
        if name != cfg.LOSS.LOSS:
            warn_unused(cfg, f"LOSS.LOSS is not {name}", entry.key_names.values())
    name = cfg.LOSS.LOSS
    return build_loss(name, **(own_settings(cfg, LOSSES[name]) if name in LOSSES else {}))


def check_class_metric(cfg: CfgNode, metric: str) -> None:
    """Raise ConfigError if EVAL.METRIC is not computed for the config's test sets."""
    if cfg.DATA.NUM_CLASSES == "auto":  # the task only opens data sets
        return
    names = metric_names(cfg.DATA.NUM_CLASSES, is_mapped=bool(cfg.DATA.TARGETMAP))
    if metric not in names:
        mapped, count = cfg.DATA.TARGETMAP, cfg.DATA.NUM_CLASSES
        raise ConfigError(
            f"EVAL.METRIC {metric} is not computed with "
            f"{'DATA.TARGETMAP' if mapped else f'DATA.NUM_CLASSES {count}'}: set EVAL.METRIC to "
            f"one of {', '.join(names[:-1])}"
        )


@as_config_error
def build_labels(cfg: CfgNode, device: torch.device) -> Labels:
    """Build the targets of multilabel classification."""
    warn_unused(cfg, "TASK is multilabel", UNUSED["multilabel"])
    _refuse_mixing(cfg)
    return Labels(
        _count_outputs(cfg),
        device=device,
        loss=cfg.MULTILABEL.LOSS,
        label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
        weight_setting=cfg.LOSS.CLASS_WEIGHTS,
    )


@as_config_error
def build_numbers(cfg: CfgNode, device: torch.device) -> Numbers:
    """Build the targets of regression."""
    warn_unused(cfg, "TASK is regression", UNUSED["regression"])
    _refuse_mixing(cfg)
    own, count = cfg.REGRESSION, _count_outputs(cfg)
    for key in ("MEAN", "STD"):
        if own[key] and cfg.DATA.NUM_CLASSES not in ("auto", len(own[key])):
            raise ConfigError(
                f"REGRESSION.{key} has {len(own[key])} numbers, but DATA.NUM_CLASSES is {count}: "
                "set one number per target"
            )
    scale = dict(mean=own.MEAN, std=own.STD)
    return Numbers(count, device=device, loss=own.LOSS, **scale)


def _count_outputs(cfg: CfgNode) -> int:
    """Return DATA.NUM_CLASSES, or 1 as a placeholder if it is "auto".

    With "auto", the task is used only to open datasets, not to build a model.
    """
    return 1 if cfg.DATA.NUM_CLASSES == "auto" else cfg.DATA.NUM_CLASSES


def _refuse_mixing(cfg: CfgNode) -> None:
    if cfg.AUG.MIXUP_PROB > 0:
        raise ConfigError(
            f"TASK {cfg.TASK} does not support mixup and cutmix: set AUG.MIXUP_PROB to 0"
        )


@as_config_error
def build_mix(cfg: CfgNode) -> Mix | None:
    """Build the function that applies mixup or cutmix to a batch; None if AUG.MIXUP_PROB is 0."""
    aug = cfg.AUG
    if aug.MIXUP_PROB <= 0:
        names = ("AUG.MIXUP", "AUG.MIXCUT", "AUG.MIXCUT_MINMAX")
        warn_unused(cfg, "AUG.MIXUP_PROB is 0", names)
        return None
    mixup = dict(mixup_alpha=aug.MIXUP, prob=aug.MIXUP_PROB, mode=aug.MIXUP_MODE)
    cutmix = dict(cutmix_alpha=aug.MIXCUT, cutmix_minmax=tuple(aug.MIXCUT_MINMAX) or None)
    common = dict(label_smoothing=cfg.LOSS.LABEL_SMOOTHING, seed=cfg.SEED)
    switch = aug.MIXUP_SWITCH_PROB
    return Mix(cfg.DATA.NUM_CLASSES, **mixup, **cutmix, switch_prob=switch, **common)


def read_class_mappings(cfg: CfgNode, loaders: Mapping[str, EvalLoader]) -> dict[str, Tensor]:
    """Read the file DATA.TARGETMAP: {name of the test set: (K, C) bool}, see
    `Classes.set_class_mapping`. loaders: {name of the test set: loader}."""
    path = path_below(cfg.DATA.PATH, cfg.DATA.TARGETMAP, "DATA.TARGETMAP")
    return {
        name: read_class_mapping(path, cfg.DATA.NUM_CLASSES, loader.classes)
        for name, loader in loaders.items()
    }


# ---- transforms


@as_config_error
def build_train_transform(cfg: CfgNode) -> Callable:
    """Build the transform that augments training images and converts them to tensors (c, S, S).

    c is INPUT.CHANNELS, and S is INPUT.IMAGE_SIZE.
    """
    aug = cfg.AUG
    if cfg.INPUT.CHANNELS not in PIL_CHANNELS:
        why = f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}"
        warn_unused(cfg, why, RGB_ONLY[aug.TIMM_AUG.USE_TRANSFORM])
    warn_unused_augmentation(cfg)
    if aug.TIMM_AUG.USE_TRANSFORM:
        own = {name.lower(): aug.TIMM_AUG[name] for name in TIMM_KEYS}
        own |= dict(use_timm=True, auto_augment=aug.TIMM_AUG.AUTO_AUGMENT or None)
    else:
        own = {name.lower(): aug[name] for name in ("COLOR_JITTER", "GRAY_SCALE", "GAUSSIAN_BLUR")}
        own["finetune"] = cfg.FINETUNE.FINETUNE and not cfg.FINETUNE.USE_TRAIN_AUG
    own |= dict(scale=tuple(aug.SCALE), ratio=tuple(aug.RATIO), channels=cfg.INPUT.CHANNELS)
    return train_transform(cfg.INPUT.IMAGE_SIZE, **transform_settings(cfg), **own)


def warn_unused_augmentation(cfg: CfgNode) -> None:
    """Log a warning if augmentation keys are set that the config's training transform ignores.

    The transform is timm's if AUG.TIMM_AUG.USE_TRANSFORM is True, and otherwise torchvision's.
    """
    aug, finetune = cfg.AUG, cfg.FINETUNE
    if aug.TIMM_AUG.USE_TRANSFORM:
        ignored = () if finetune.USE_TRAIN_AUG else ("FINETUNE.FINETUNE",)
        warn_unused(cfg, "AUG.TIMM_AUG.USE_TRANSFORM is True", (*RGB_ONLY[False], *ignored))
    else:
        names = [f"AUG.TIMM_AUG.{name}" for name in TIMM_KEYS]
        warn_unused(cfg, "AUG.TIMM_AUG.USE_TRANSFORM is False", names)
    if not finetune.FINETUNE:
        warn_unused(cfg, "FINETUNE.FINETUNE is False", ("FINETUNE.USE_TRAIN_AUG",))


@as_config_error
def build_eval_transform(cfg: CfgNode, **changes: Any) -> Callable[[Any], Tensor]:
    """Build the transform that converts images to tensors (c, S, S) for evaluation.

    c is INPUT.CHANNELS, and S is INPUT.IMAGE_SIZE. changes: arguments of `eval_transform` to use
    instead of the config's values.
    """
    settings = dict(channels=cfg.INPUT.CHANNELS, **transform_settings(cfg))
    return eval_transform(cfg.INPUT.IMAGE_SIZE, **{**settings, **changes})


def transform_settings(cfg: CfgNode) -> dict[str, Any]:
    """Return keyword arguments for transforms: the config's mean, std, crop_pct, interpolation."""
    return dict(
        mean=list(cfg.INPUT.MEAN),
        std=list(cfg.INPUT.STD),
        crop_pct=cfg.INPUT.CROP_PCT,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )


# ---- network and datasets


class ImageBuilder:
    """Builds the network, and opens the datasets, of a config with one target per image.

    target_type: type of the targets, "class", "labels" or "numbers", see `ImageDataset`. The
    argument `any_classes` of the methods is whether a dataset may have other than DATA.NUM_CLASSES
    classes.
    """

    def __init__(self, cfg: CfgNode, target_type: str):
        self.cfg, self.target_type = cfg, target_type
        self._parts: dict[str, dict[str, np.ndarray]] = {}  # {dataset: {split: indices}}

    def build_model(self, *, load_pretrained: bool) -> nn.Module:
        """Build the network, see `Task.build_model`."""
        return build_network(self.cfg, self.cfg.DATA.NUM_CLASSES, load_pretrained=load_pretrained)

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path) -> Report:
        """Load a weight file into the network, with its head as FINETUNE.HEAD says."""
        finetune = self.cfg.FINETUNE
        return load_weights(model, path, head=finetune.HEAD, rule=finetune.RESIZE)

    def mean_and_std(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the mean and the standard deviation with which images are normalized."""
        return self.cfg.INPUT.MEAN, self.cfg.INPUT.STD

    def synthetic(self, num_samples: int, folder: Path, split: str) -> ImageDataset:
        """Build a dataset of synthetic images, see `Task.synthetic`."""
        cfg = self.cfg
        transform = build_train_transform(cfg) if split == "train" else build_eval_transform(cfg)
        own = dict(n=num_samples, size=cfg.INPUT.IMAGE_SIZE, num_classes=cfg.DATA.NUM_CLASSES)
        own |= dict(target_type=self.target_type, channels=cfg.INPUT.CHANNELS)
        return build_dataset(SYNTHETIC, folder, split, loader_transform(transform), **own)

    def open_train_set(self, *, any_classes: bool) -> ImageDataset:
        """Open the sets in DATA.TRAIN, as one dataset."""
        names, transform = self.cfg.DATA.TRAIN, build_train_transform(self.cfg)
        sets = [self._open_part(name, "train", transform, any_classes) for name in names]
        for name, other in zip(names[1:], sets[1:]):
            by_position = self.cfg.DATA.CLASSES == "by_position"
            match_classes(other, sets[0].classes, name, by_position=by_position)
        dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, names)
        if not any_classes:
            data.check_num_classes(self.cfg, dataset, ", ".join(names))
        if dataset.weights is not None and not dataset.weights.any():
            raise DataError(f"DATA.TRAIN {', '.join(names)}: all sample weights are 0")
        return dataset

    def open_test_set(
        self, name: str, split: str, class_names: Sequence[str], *, any_classes: bool
    ) -> ImageDataset:
        """Open a test set. split: "val" or "test". class_names: names of the model's classes."""
        transform = build_eval_transform(self.cfg)
        dataset = self._open_part(name, split, transform, any_classes)
        if not self.cfg.DATA.TARGETMAP:
            if self._is_for_evaluation(name) and self.cfg.DATA.CLASSES != "by_position":
                add_learned_classes(dataset, class_names, name)
            if not any_classes:
                data.check_num_classes(self.cfg, dataset, name)
        return dataset

    def _is_for_evaluation(self, name: str) -> bool:
        """Return whether a dataset takes the argument `all_rows` and is not in DATA.TRAIN.

        For such a dataset, `all_rows` is True by default: without splits, all images are used.
        """
        return "all_rows" in own_arguments(name) and name not in self.cfg.DATA.TRAIN

    def _open_part(
        self, name: str, split: str, transform: Callable, any_classes: bool
    ) -> ImageDataset:
        """Open the split "train", "val" or "test" of the dataset `name`.

        The config may take this split from the dataset's training split, for example by
        DATA.VAL_FRACTION. The result is then a part of the training split. transform: function that
        is applied to each image.
        """
        if split not in derived_splits(self.cfg, name):
            return self._open(name, split, transform, any_classes)
        dataset = self._open(name, "train", transform, any_classes)
        if name not in self._parts:
            self._parts[name] = split_indices(self.cfg, name, dataset)
        return Subset(dataset, self._parts[name][split], split)

    def _open(self, name: str, split: str, transform: Callable, any_classes: bool) -> ImageDataset:
        cfg, taken = self.cfg, own_arguments(name)
        with data.dataset_arguments(cfg, name, taken) as own:
            is_mapped = split != "train" and cfg.DATA.TARGETMAP
            is_free = is_mapped or any_classes or cfg.DATA.NUM_CLASSES == "auto"
            if is_numbered(name) and not is_free:
                own.setdefault("num_classes", cfg.DATA.NUM_CLASSES)
            if "target_type" in taken:
                own["target_type"] = self.target_type
            if self._is_for_evaluation(name):
                own.setdefault("all_rows", True)
            if "channels" in taken:
                own["channels"] = cfg.INPUT.CHANNELS
            elif cfg.INPUT.CHANNELS not in PIL_CHANNELS:
                raise ConfigError(
                    f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}, but {name} has RGB images only: set "
                    "INPUT.CHANNELS to 1 or 3"
                )
            loaded = loader_transform(transform)
            dataset = build_dataset(name, cfg.DATA.PATH, split, loaded, **own)
        if dataset.target_type != self.target_type:
            raise DataError(
                f"{name} has {TARGETS[dataset.target_type]} per image, but TASK {cfg.TASK} needs "
                f"{TARGETS[self.target_type]} per image: use another dataset or TASK"
            )
        dataset.value_range, dataset.channels = cfg.DATA.VALUE_RANGE, cfg.INPUT.CHANNELS
        return dataset
