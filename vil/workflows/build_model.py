"""Build the model of a config."""

from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from vil.tasks import task_for
from vil.utils.errors import in_python_words
from vil.workflows.configure import Overrides, make_config


@in_python_words
def build_model(
    config: CfgNode | str | Path, overrides: Overrides | None = None, *, pretrained: bool = True
) -> nn.Module:
    """Build the model of a config on the CPU. Raises ConfigError if the config is invalid.

    The weights are random, with the seed SEED. A torchvision or timm model gets its published
    weights instead if both `pretrained` and MODEL.PRETRAINED are set. The weights in
    MODEL.MODEL_PATH are not loaded. To load them, use `vil.load_for_inference`.
    """
    cfg = make_config(config, overrides)
    return task_for(cfg, torch.device("cpu")).build_model(load_pretrained=pretrained)
