"""Build the model of a config."""

from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from vil.tasks import task_for
from vil.workflows.configure import Overrides, make_config


def build_model(
    config: CfgNode | str | Path, overrides: Overrides | None = None, *, pretrained: bool = True
) -> nn.Module:
    """Build the model of a config on the CPU, with random weights drawn from the config's SEED.

    pretrained: if MODEL.PRETRAINED is set, load the published weights of a torchvision or timm
    model. The weights in MODEL.MODEL_PATH are not loaded; for these, use `vil.load_for_inference`.
    Raises ConfigError if the config is invalid.
    """
    cfg = make_config(config, overrides)
    return task_for(cfg, torch.device("cpu")).build_model(load_pretrained=pretrained)
