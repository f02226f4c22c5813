"""Build the classification task from a config: model, datasets, loss, mixup."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.builders import data
from vil.builders.cost import model_cost
from vil.builders.model import build_network
from vil.config.access import own_settings, warn_unused
from vil.data import build_dataset, is_numbered, own_arguments
from vil.data.classes import match_classes, read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.datasets.concat import ConcatImageDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.data.transforms import eval_transform, train_transform
from vil.engine.distributed import DistInfo
from vil.pretrained.load_weights import Report, load_weights
from vil.tasks.base import ConfigTask, Datasets, TaskReport
from vil.tasks.classification import LOSSES
from vil.tasks.classification.losses import LossFunction, build_loss
from vil.tasks.classification.report import report_test_set
from vil.tasks.classification.task import ClassificationTask
from vil.utils.errors import as_config_error
from vil.utils.safe_files import path_below

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
SYNTHETIC = "fake"  # dataset for `synthetic`


class Classification(ConfigTask, ClassificationTask):
    """The classification task, built from a config."""

    own_arguments = staticmethod(own_arguments)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        warn_unused(cfg, "TASK is classification", ("DETECTION",))
        loss = dict(loss=_build_loss(cfg), label_smoothing=cfg.LOSS.LABEL_SMOOTHING)
        classes = dict(num_classes=cfg.DATA.NUM_CLASSES, per_class=cfg.OUTPUT_PERCLASS_ACC)
        super().__init__(cfg, device, transform=build_eval_transform(cfg), **loss, **classes)

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        return build_network(self.cfg, self.num_classes, load_pretrained=load_pretrained)

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        # strict is ignored: weights must be complete, except for a head replaced by FINETUNE.HEAD
        finetune = self.cfg.FINETUNE
        return load_weights(model, path, head=finetune.HEAD, rule=finetune.RESIZE)

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        mix = _build_mix(self.cfg)
        self.mix = mix and partial(mix, rank=dist.rank)
        return super().train_loader(dist, **options)

    @as_config_error
    def test_loaders(
        self, dist: DistInfo, *, datasets: Datasets = None, **options: Any
    ) -> dict[str, EvalLoader]:
        loaders, cfg = super().test_loaders(dist, datasets=datasets, **options), self.cfg
        if datasets is None and cfg.DATA.TARGETMAP:
            path = path_below(cfg.DATA.PATH, cfg.DATA.TARGETMAP, "DATA.TARGETMAP")
            self.set_class_mapping({
                name: read_class_mapping(path, self.num_classes, loader.classes)
                for name, loader in loaders.items()
            })  # fmt: skip
        return loaders

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> ImageDataset:
        transform = build_train_transform(self.cfg) if split == "train" else self.transform
        own = dict(n=num_samples, size=self.cfg.INPUT.IMAGE_SIZE, num_classes=self.num_classes)
        return build_dataset(SYNTHETIC, folder, split, transform, **own)

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        return report_test_set(self, model, class_names, checkpoint)

    cost = staticmethod(model_cost)

    def open_train_set(self) -> ImageDataset:
        names, transform = self.cfg.DATA.TRAIN, build_train_transform(self.cfg)
        sets = [self._open(name, "train", transform) for name in names]
        for name, other in zip(names[1:], sets[1:]):
            by_position = self.cfg.DATA.CLASSES == "by_position"
            match_classes(other, sets[0].classes, name, by_position=by_position)
        dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, names)
        data.check_num_classes(self.cfg, dataset, ", ".join(names))
        return dataset

    def open_test_set(self, name: str) -> ImageDataset:
        dataset = self._open(name, "val", self.transform)
        if not self.cfg.DATA.TARGETMAP:
            data.check_num_classes(self.cfg, dataset, name)
        return dataset

    def _open(self, name: str, split: str, transform: Callable) -> ImageDataset:
        cfg = self.cfg
        with data.dataset_arguments(cfg, name, self.own_arguments(name)) as own:
            if is_numbered(name) and not (split == "val" and cfg.DATA.TARGETMAP):
                own.setdefault("num_classes", cfg.DATA.NUM_CLASSES)
            dataset = build_dataset(name, cfg.DATA.PATH, split, transform, **own)
        dataset.value_range = cfg.DATA.VALUE_RANGE
        return dataset


def _build_loss(cfg: CfgNode) -> LossFunction:
    for name, entry in LOSSES.items():
        if name != cfg.LOSS.LOSS:
            warn_unused(cfg, f"LOSS.LOSS is not {name}", entry.key_names.values())
    name = cfg.LOSS.LOSS
    return build_loss(name, **(own_settings(cfg, LOSSES[name]) if name in LOSSES else {}))


@as_config_error
def _build_mix(cfg: CfgNode) -> Mix | None:
    aug = cfg.AUG
    if aug.MIXUP_PROB <= 0:
        return None
    mixup = dict(mixup_alpha=aug.MIXUP, prob=aug.MIXUP_PROB, mode=aug.MIXUP_MODE)
    cutmix = dict(cutmix_alpha=aug.MIXCUT, cutmix_minmax=tuple(aug.MIXCUT_MINMAX) or None)
    common = dict(label_smoothing=cfg.LOSS.LABEL_SMOOTHING, seed=cfg.SEED)
    switch = aug.MIXUP_SWITCH_PROB
    return Mix(cfg.DATA.NUM_CLASSES, **mixup, **cutmix, switch_prob=switch, **common)


@as_config_error
def build_train_transform(cfg: CfgNode) -> Callable:
    """Build the transform of training images, from PIL images to augmented tensors (3, S, S)
    of the image size S."""
    aug = cfg.AUG
    if aug.TIMM_AUG.USE_TRANSFORM:
        names = ("HFLIP", "VFLIP", "COLOR_JITTER", "RE_PROB", "RE_MODE", "RE_COUNT")
        own = {name.lower(): aug.TIMM_AUG[name] for name in names}
        own |= dict(use_timm=True, auto_augment=aug.TIMM_AUG.AUTO_AUGMENT or None)
    else:
        own = {name.lower(): aug[name] for name in ("COLOR_JITTER", "GRAY_SCALE", "GAUSSIAN_BLUR")}
        own["finetune"] = cfg.FINETUNE.FINETUNE and not cfg.FINETUNE.USE_TRAIN_AUG
    crop = dict(scale=tuple(aug.SCALE), ratio=tuple(aug.RATIO))
    return train_transform(cfg.INPUT.IMAGE_SIZE, **crop, **transform_settings(cfg), **own)


@as_config_error
def build_eval_transform(cfg: CfgNode) -> Callable[[Any], Tensor]:
    """Build the transform of evaluation images, from PIL images to tensors (3, S, S) of the
    image size S."""
    return eval_transform(cfg.INPUT.IMAGE_SIZE, **transform_settings(cfg))


def transform_settings(cfg: CfgNode) -> dict[str, Any]:
    """Return the config's mean, std, crop_pct and interpolation, by timm's argument names."""
    return dict(
        mean=list(cfg.INPUT.MEAN),
        std=list(cfg.INPUT.STD),
        crop_pct=cfg.INPUT.CROP_PCT,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )
