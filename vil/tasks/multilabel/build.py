"""Build the multilabel task from a config: model, datasets, loss, weights of positive labels."""

import torch
from yacs.config import CfgNode

from vil.config.access import warn_unused
from vil.data.dataset import ImageDataset
from vil.tasks.class_weights import parse_class_weights
from vil.tasks.image_task import ConfigImageTask, count_outputs, refuse_mixing
from vil.tasks.multilabel.report import report_test_set
from vil.tasks.multilabel.task import MultilabelTask
from vil.utils.errors import as_config_error

UNUSED = ("LOSS.LOSS", "LOSS.FOCAL", "LOSS.LOGIT_ADJUSTMENT", "DATA.TARGETMAP")


class Multilabel(ConfigImageTask, MultilabelTask):
    """The multilabel task, built from a config."""

    target_type = "labels"
    report = report_test_set

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        warn_unused(cfg, "TASK is multilabel", UNUSED)
        refuse_mixing(cfg)
        super().__init__(
            cfg,
            device,
            num_labels=count_outputs(cfg),
            loss=cfg.MULTILABEL.LOSS,
            label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
        )

    @as_config_error
    def read_targets(self, dataset: ImageDataset) -> None:
        setting, count = self.cfg.LOSS.CLASS_WEIGHTS, len(dataset.classes)
        weights = parse_class_weights(setting, dataset.targets, count)
        self.positive_weights = self.to_device(weights)
