"""Build the network that a config describes: an MsViT, or a model of timm or torchvision."""

import logging

import torch
from torch import nn
from yacs.config import CfgNode

from vil.config.defaults import leaves
from vil.config.unused_keys import warn_unused
from vil.config.yaml_source import format_options
from vil.integrations.external_models import (
    NORMALIZED_BY_HALF,
    build_external,
    freeze_stages,
    preprocessing,
)
from vil.integrations.patch_attention import patch_from_text
from vil.models.build import build_msvit
from vil.models.registry import ARCHS
from vil.utils.errors import ConfigError, as_config_error

log = logging.getLogger(__name__)


@as_config_error
def build_network(
    cfg: CfgNode, num_outputs: int, *, load_pretrained: bool = False, any_size: bool = False
) -> nn.Module:
    """Build the network that the config describes, with a linear head of `num_outputs` outputs.

    The weights are random. A timm or torchvision model gets its published weights if both
    `load_pretrained` and MODEL.PRETRAINED are set. any_size: for images of any size, see
    `build_external`; an MsViT always accepts them. Raises ConfigError if the config is invalid.
    """
    torch.manual_seed(cfg.SEED)
    arch, patch = cfg.MODEL.ARCH, cfg.MODEL.PATCH_ATTENTION
    if arch == "msvit":
        warn_unused(cfg, "MODEL.ARCH is msvit", ["MODEL.PATCH_ATTENTION"])
        return build_msvit(cfg, num_outputs)
    taken = ("DROP", "DROP_PATH") if arch.startswith("timm/") else ()
    unused = [f"MODEL.VIT.{key}" for key in leaves(cfg.MODEL.VIT) if key not in taken]
    warn_unused(cfg, f"{arch} is an external model", unused)
    if arch in ARCHS:
        folder = "digits" if arch == "vil_nano" else "imagenet"
        raise ConfigError(
            f"MODEL.ARCH {arch} is not an architecture but a packaged config: use "
            f"--config-file {folder}/{arch}.yaml"
        )
    model = build_external(
        arch,
        pretrained=cfg.MODEL.PRETRAINED and load_pretrained,
        num_classes=num_outputs,
        img_size=cfg.INPUT.IMAGE_SIZE,
        in_chans=cfg.INPUT.CHANNELS,
        drop_rate=cfg.MODEL.VIT.DROP,
        drop_path_rate=cfg.MODEL.VIT.DROP_PATH,
        grad_checkpoint=cfg.MODEL.GRAD_CHECKPOINT,
        any_size=any_size,
    )
    if patch:
        patch_from_text(model, patch, cfg.INPUT.IMAGE_SIZE)
    if arch in NORMALIZED_BY_HALF:
        model.transform_input = False  # INPUT.MEAN and INPUT.STD are those of the weights instead
    if cfg.FINETUNE.FREEZE_STAGES:
        freeze_stages(model, cfg.FINETUNE.FREEZE_STAGES, arch)
    if cfg.MODEL.PRETRAINED and load_pretrained:
        _warn_other_preprocessing(cfg)
    return model


def _warn_other_preprocessing(cfg: CfgNode) -> None:
    """Warn if the config does not preprocess images as the published weights of its model need."""
    values, arch = leaves(cfg), cfg.MODEL.ARCH
    wanted = preprocessing(arch, cfg.INPUT.CHANNELS)
    differ = {key: value for key, value in wanted.items() if values[key] != value}
    if differ:
        log.warning(
            "%s: the published weights of %s were trained with other values: to use them, add %s",
            ", ".join(f"{key} {values[key]}" for key in differ),
            arch,
            format_options(differ),
        )
