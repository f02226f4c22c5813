"""From a config to the classification task: model, data, loss, mixing."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.builders import data
from vil.builders.cost import CostRow, model_cost
from vil.builders.device import amp_dtype, memory_format
from vil.builders.model import build_network
from vil.config.access import own_settings, warn_unused
from vil.data import build_dataset, is_numbered, own_arguments
from vil.data.class_mapping import read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.datasets.concat import ConcatImageDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.data.transforms import eval_transform, train_transform
from vil.engine.distributed import DistInfo
from vil.pretrained.load_weights import Report, load_weights
from vil.tasks.base import TaskReport
from vil.tasks.classification import LOSSES
from vil.tasks.classification.losses import LossFunction, build_loss
from vil.tasks.classification.report import report_on
from vil.tasks.classification.task import ClassificationTask
from vil.utils.errors import as_config_error

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
SYNTHETIC = "fake"  # the data set of synthetic images


class Classification(ClassificationTask):
    """The classification task of a config."""

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        warn_unused(cfg, "TASK is classification", ("DETECTION",))
        super().__init__(
            device=device,
            amp_dtype=amp_dtype(cfg),
            memory_format=memory_format(cfg),
            num_classes=cfg.DATA.NUM_CLASSES,
            loss=_build_loss(cfg),
            label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
            per_class=cfg.OUTPUT_PERCLASS_ACC,
            transform=build_eval_transform(cfg),
        )
        self.cfg = cfg

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        return build_network(self.cfg, self.num_classes, load_pretrained=load_pretrained)

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        # a classifier's weights are always complete, up to a head that FINETUNE.HEAD replaces
        finetune = self.cfg.FINETUNE
        return load_weights(model, path, head=finetune.HEAD, rule=finetune.RESIZE)

    def train_loader(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        dataset: ImageDataset | None = None,
    ) -> TrainLoader:
        mix = _build_mix(self.cfg)
        self.mix = mix and partial(mix, rank=dist.rank)
        open_train = (lambda: dataset) if dataset is not None else self._open_train_set
        return data.build_train_loader(self.cfg, dist, self.device, open_train, bad_file)

    @as_config_error
    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Mapping[str, ImageDataset] | None = None,
    ) -> dict[str, EvalLoader]:
        cfg = self.cfg
        if datasets is not None:
            self.test_sets = {
                name: data.build_eval_loader(cfg, dist, self.device, dataset, bad_file)
                for name, dataset in datasets.items()
            }
            return self.test_sets
        data.check_dataset_arguments(cfg, own_arguments)
        self.test_sets = data.build_test_loaders(
            cfg, dist, self.device, self._open_test_set, bad_file
        )
        if cfg.DATA.TARGETMAP:
            path = Path(cfg.DATA.PATH, cfg.DATA.TARGETMAP)
            self.set_class_mapping({
                name: read_class_mapping(path, self.num_classes, loader.classes)
                for name, loader in self.test_sets.items()
            })  # fmt: skip
        else:
            for name, loader in self.test_sets.items():
                data.check_num_classes(cfg, loader, name)
        return self.test_sets

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> ImageDataset:
        return build_dataset(
            SYNTHETIC,
            folder,
            split,
            build_train_transform(self.cfg) if split == "train" else self.transform,
            n=num_samples,
            size=self.cfg.INPUT.IMAGE_SIZE,
            num_classes=self.num_classes,
        )

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        return report_on(self, model, class_names, checkpoint)

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        return model_cost(model, size)

    def _open_train_set(self) -> ImageDataset:
        cfg = self.cfg
        data.check_dataset_arguments(cfg, own_arguments)
        transform = build_train_transform(cfg)
        sets = [self._open(name, "train", transform) for name in cfg.DATA.TRAIN]
        dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, cfg.DATA.TRAIN)
        data.check_num_classes(cfg, dataset, ", ".join(cfg.DATA.TRAIN))
        return dataset

    def _open_test_set(self, name: str) -> ImageDataset:
        return self._open(name, "val", self.transform)

    def _open(self, name: str, split: str, transform: Callable) -> ImageDataset:
        cfg = self.cfg
        own = data.dataset_arguments(cfg, own_arguments(name))
        if is_numbered(name) and not (split == "val" and cfg.DATA.TARGETMAP):
            own.setdefault("num_classes", cfg.DATA.NUM_CLASSES)
        with data.refused_arguments(cfg, name):
            return build_dataset(name, cfg.DATA.PATH, split, transform, **own)


def _build_loss(cfg: CfgNode) -> LossFunction:
    name = cfg.LOSS.LOSS
    for other, entry in LOSSES.items():
        if other != name:
            warn_unused(cfg, f"LOSS.LOSS is not {other}", entry.key_names.values())
    own = own_settings(cfg, LOSSES[name]) if name in LOSSES else {}
    return build_loss(name, **own)


@as_config_error
def _build_mix(cfg: CfgNode) -> Mix | None:
    if cfg.AUG.MIXUP_PROB <= 0:
        return None
    return Mix(
        cfg.DATA.NUM_CLASSES,
        mixup_alpha=cfg.AUG.MIXUP,
        cutmix_alpha=cfg.AUG.MIXCUT,
        cutmix_minmax=tuple(cfg.AUG.MIXCUT_MINMAX) or None,
        prob=cfg.AUG.MIXUP_PROB,
        switch_prob=cfg.AUG.MIXUP_SWITCH_PROB,
        mode=cfg.AUG.MIXUP_MODE,
        label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
        seed=cfg.SEED,
    )


@as_config_error
def build_train_transform(cfg: CfgNode) -> Callable:
    """From a training image (PIL) to an augmented tensor (3, S, S)."""
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
        **_normalization(cfg),
        **(by_timm if timm.USE_TRANSFORM else plain),
    )


@as_config_error
def build_eval_transform(cfg: CfgNode) -> Callable[[Any], Tensor]:
    """From an image (PIL) to the tensor (3, S, S) that is evaluated."""
    return eval_transform(cfg.INPUT.IMAGE_SIZE, crop_pct=cfg.INPUT.CROP_PCT, **_normalization(cfg))


def _normalization(cfg: CfgNode) -> dict[str, Any]:
    return dict(
        mean=cfg.INPUT.MEAN,
        std=cfg.INPUT.STD,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )
