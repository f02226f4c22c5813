"""The model of a config, freshly initialized."""

from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from vil.tasks import task_for
from vil.workflows.configure import Overrides, make_config


def build_model(
    config: CfgNode | str | Path, overrides: Overrides | None = None, *, pretrained: bool = True
) -> nn.Module:
    """Build the model that a config trains, on the CPU, initialized from SEED.

    pretrained: with MODEL.PRETRAINED, an external model has its published weights. MODEL.MODEL_PATH
    is not loaded: see `vil.load_for_inference`. Raises ConfigError for what cannot be built.
    """
    cfg = make_config(config, overrides)
    return task_for(cfg, torch.device("cpu")).build_model(load_pretrained=pretrained)
