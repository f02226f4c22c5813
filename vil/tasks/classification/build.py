"""Build the classification task from a config: model, datasets, loss, mixup."""

from functools import partial
from typing import Any

import torch
from yacs.config import CfgNode

from vil.config.access import own_settings, warn_unused
from vil.data.classes import read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.engine.distributed import DistInfo
from vil.tasks.base import Datasets
from vil.tasks.class_weights import logit_shifts, parse_class_weights
from vil.tasks.classification import LOSSES
from vil.tasks.classification.losses import LossFunction, build_loss
from vil.tasks.classification.metrics import metric_names
from vil.tasks.classification.report import report_test_set
from vil.tasks.classification.task import ClassificationTask
from vil.tasks.image_task import ConfigImageTask
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.safe_files import path_below


class Classification(ConfigImageTask, ClassificationTask):
    """The classification task, built from a config."""

    report = report_test_set

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        loss = dict(loss=_build_loss(cfg), label_smoothing=cfg.LOSS.LABEL_SMOOTHING)
        classes = dict(num_classes=cfg.DATA.NUM_CLASSES, per_class=cfg.OUTPUT_PERCLASS_ACC)
        super().__init__(cfg, device, **loss, **classes)
        self._check_metric()

    def _check_metric(self) -> None:
        """Raise ConfigError if EVAL.METRIC is not computed for the config's test sets."""
        if self.num_classes == "auto":  # this task only opens data sets
            return
        is_mapped, name = bool(self.cfg.DATA.TARGETMAP), self.metric.name
        names = metric_names(self.num_classes, is_mapped=is_mapped)
        if name not in names:
            classes = "DATA.TARGETMAP" if is_mapped else f"DATA.NUM_CLASSES {self.num_classes}"
            raise ConfigError(
                f"EVAL.METRIC {name} is not computed with {classes}: set EVAL.METRIC to one of "
                f"{', '.join(names[:-1])}"
            )

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        mix = _build_mix(self.cfg)
        self.mix = mix and partial(mix, rank=dist.rank)
        return super().train_loader(dist, **options)

    @as_config_error
    def read_targets(self, dataset: ImageDataset) -> None:
        loss, names, targets = self.cfg.LOSS, dataset.classes, dataset.targets
        weights = parse_class_weights(loss.CLASS_WEIGHTS, targets, len(names))
        self.class_weights = self.to_device(weights)
        if loss.LOGIT_ADJUSTMENT:
            shifts = logit_shifts(targets, names, loss.LOGIT_ADJUSTMENT)
            self.logit_shifts = self.to_device(shifts)
        self.check_weights()

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
        names = ("AUG.MIXUP", "AUG.MIXCUT", "AUG.MIXCUT_MINMAX")
        warn_unused(cfg, "AUG.MIXUP_PROB is 0", names)
        return None
    mixup = dict(mixup_alpha=aug.MIXUP, prob=aug.MIXUP_PROB, mode=aug.MIXUP_MODE)
    cutmix = dict(cutmix_alpha=aug.MIXCUT, cutmix_minmax=tuple(aug.MIXCUT_MINMAX) or None)
    common = dict(label_smoothing=cfg.LOSS.LABEL_SMOOTHING, seed=cfg.SEED)
    switch = aug.MIXUP_SWITCH_PROB
    return Mix(cfg.DATA.NUM_CLASSES, **mixup, **cutmix, switch_prob=switch, **common)
