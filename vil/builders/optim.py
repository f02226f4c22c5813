"""Optimizer, learning-rate schedule, gradient scaler and weight average of a config."""

import logging
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from yacs.config import CfgNode

from vil.config.access import own_settings
from vil.config.defaults import KEYS
from vil.integrations.external_models import find_no_decay_params, number_layers
from vil.models.vision_longformer import MsViT
from vil.optim import OPTIMIZERS, SCHEDULES, Schedule, decay_groups
from vil.optim import build_optimizer as optimizer_by_name
from vil.utils.errors import as_config_error

log = logging.getLogger(__name__)


class Optimization(NamedTuple):
    """The objects that update the weights."""

    optimizer: Optimizer
    schedule: Schedule
    scaler: GradScaler
    name: str  # of the optimizer, as a checkpoint has it


def build_optimization(
    cfg: CfgNode, model: nn.Module, device: torch.device, steps_per_epoch: int
) -> Optimization:
    """Build optimizer, learning-rate schedule and gradient scaler."""
    return Optimization(
        build_optimizer(cfg, model),
        build_schedule(cfg, steps_per_epoch),
        build_scaler(cfg, device),
        optimizer_name(cfg),
    )


@as_config_error
def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer. Its groups have the weight decay OPTIM.WD or, for norms, positions,
    tokens and the head's bias, OPTIM.WD0; each is split by layers if OPTIM.LAYER_DECAY is below 1.
    """
    optim = cfg.OPTIM
    entry = OPTIMIZERS.entry(optimizer_name(cfg))
    if entry.facts.get("adaptive") and float(KEYS["OPTIM.LR"].default) == optim.LR:
        log.warning("OPTIM.LR is %g, the default, which no recipe of %s has", optim.LR, optim.OPT)
    groups = decay_groups(
        model.named_parameters(),
        optim.WD,
        optim.WD0,
        model.no_weight_decay() if isinstance(model, MsViT) else find_no_decay_params(model),
        **(_layers(model) if optim.LAYER_DECAY < 1 else {}),
        layer_decay=optim.LAYER_DECAY,
    )
    return optimizer_by_name(
        entry.name,
        groups,
        lr=optim.LR,
        momentum=optim.MOM,
        nu=optim.NU,
        betas=(optim.ADAM.BETA1, optim.ADAM.BETA2),
        eps=optim.ADAM.EPS,
        own=own_settings(cfg, entry),
    )


def optimizer_name(cfg: CfgNode) -> str:
    """The entry of OPTIMIZERS: sgd inside LARC has its own."""
    return "larc" if cfg.SOLVER.USE_LARC else cfg.OPTIM.OPT


def _layers(model: nn.Module) -> dict[str, Any]:
    """The depth of each parameter, for layer-wise decay."""
    if hasattr(model, "layer_of"):
        return {"layer_of": model.layer_of, "num_layers": model.num_layers}
    numbers = number_layers(model)
    return {"layer_of": numbers.__getitem__, "num_layers": max(numbers.values())}


def build_scaler(cfg: CfgNode, device: torch.device) -> GradScaler:
    """Scales the loss in float16, where small gradients would vanish; else does nothing."""
    return GradScaler(device.type, enabled=cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16")


@as_config_error
def build_schedule(cfg: CfgNode, steps_per_epoch: int) -> Schedule:
    """The learning rate of every step."""
    return Schedule(
        cfg.SOLVER.LR_POLICY,
        cfg.OPTIM.LR,
        steps_per_epoch,
        cfg.OPTIM.EPOCHS,
        warmup_epochs=cfg.SOLVER.WARMUP_EPOCHS,
        warmup_factor=cfg.SOLVER.WARMUP_FACTOR,
        warmup_method=cfg.SOLVER.WARMUP_METHOD,
        min_lr=cfg.SOLVER.MIN_LR,
        drop_freq=cfg.OPTIM.DROP_FREQ,
        drop_epochs=tuple(cfg.OPTIM.DROP_EPOCHS),
        drop_factor=cfg.OPTIM.DROP_FACTOR,
        epoch_based=cfg.SOLVER.EPOCH_BASED_SCHEDULE,
        own=own_settings(cfg, SCHEDULES.entry(cfg.SOLVER.LR_POLICY)),
    )
