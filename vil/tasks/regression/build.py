"""Build the regression task from a config: model, datasets, loss, scale of the targets."""

import numpy as np
import torch
from yacs.config import CfgNode

from vil.config.access import warn_unused
from vil.data.dataset import ImageDataset
from vil.tasks.image_task import ConfigImageTask, count_outputs, refuse_mixing
from vil.tasks.regression.report import report_test_set
from vil.tasks.regression.task import RegressionTask
from vil.utils.errors import ConfigError, DataError, as_config_error

UNUSED = ("LOSS", "DATA.TARGETMAP")


class Regression(ConfigImageTask, RegressionTask):
    """The regression task, built from a config."""

    target_type = "numbers"
    report = report_test_set

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        warn_unused(cfg, "TASK is regression", UNUSED)
        refuse_mixing(cfg)
        own, count = cfg.REGRESSION, count_outputs(cfg)
        for key in ("MEAN", "STD"):
            if own[key] and cfg.DATA.NUM_CLASSES not in ("auto", len(own[key])):
                raise ConfigError(
                    f"REGRESSION.{key} has {len(own[key])} numbers, but DATA.NUM_CLASSES is "
                    f"{count}: set one number per target"
                )
        scale = dict(mean=own.MEAN or [0.0] * count, std=own.STD or [1.0] * count)
        super().__init__(cfg, device, loss=own.LOSS, **scale)

    def read_targets(self, dataset: ImageDataset) -> None:
        """Set the mean and the standard deviation with which targets are normalized.

        They are taken from the config (REGRESSION.MEAN, REGRESSION.STD). If they are not set there,
        they are computed from the training set `dataset`. Raises DataError if a computed standard
        deviation is 0.
        """
        own, targets = self.cfg.REGRESSION, dataset.targets.astype(np.float64)
        mean = list(own.MEAN) or targets.mean(axis=0).tolist()
        std = list(own.STD) or targets.std(axis=0).tolist()
        constant = [name for name, value in zip(dataset.classes, std) if value == 0]
        if constant:
            raise DataError(
                f"{len(constant)} of {len(std)} targets (such as {constant[0]}) are constant in "
                "the training set and cannot be learned: remove them"
            )
        self.set_scale(mean, std)
        self.learned_settings = {"REGRESSION.MEAN": mean, "REGRESSION.STD": std}
