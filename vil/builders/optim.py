"""Build the optimizer, learning-rate schedule and gradient scaler of a config."""

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
    """Optimizer, learning-rate schedule and gradient scaler of a training run."""

    optimizer: Optimizer
    schedule: Schedule
    scaler: GradScaler
    name: str  # the optimizer's name, which checkpoints store


def build_optimization(
    cfg: CfgNode, model: nn.Module, device: torch.device, steps_per_epoch: int
) -> Optimization:
    """Build the optimizer, the learning-rate schedule and the gradient scaler of a config."""
    return Optimization(
        build_optimizer(cfg, model),
        build_schedule(cfg, steps_per_epoch),
        build_scaler(cfg, device),
        optimizer_name(cfg),
    )


@as_config_error
def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer and its parameter groups.

    The weight decay is OPTIM.WD0 for norms, position parameters, global tokens and the head's bias,
    and OPTIM.WD for all other parameters. If OPTIM.LAYER_DECAY < 1, each layer has its own groups.
    """
    optim = cfg.OPTIM
    entry = OPTIMIZERS.entry(optimizer_name(cfg))
    if entry.facts.get("adaptive") and float(KEYS["OPTIM.LR"].default) == optim.LR:
        text = "OPTIM.LR is %g, the default, which is too large for %s: set it"
        log.warning(text, optim.LR, optim.OPT)
    groups = decay_groups(
        model.named_parameters(),
        optim.WD,
        optim.WD0,
        model.no_weight_decay() if isinstance(model, MsViT) else find_no_decay_params(model),
        **(_layer_arguments(model) if optim.LAYER_DECAY < 1 else {}),
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
    """Return the optimizer's name in the registry OPTIMIZERS: "larc" if SOLVER.USE_LARC is set,
    else OPTIM.OPT."""
    return "larc" if cfg.SOLVER.USE_LARC else cfg.OPTIM.OPT


def _layer_arguments(model: nn.Module) -> dict[str, Any]:
    """Return arguments of `decay_groups` for layer-wise learning-rate decay: `layer_of`, a function
    from a parameter's name to its layer's number, and `num_layers`, the largest of the numbers."""
    if hasattr(model, "layer_of"):
        return {"layer_of": model.layer_of, "num_layers": model.num_layers}
    numbers = number_layers(model)
    return {"layer_of": numbers.__getitem__, "num_layers": max(numbers.values())}


def build_scaler(cfg: CfgNode, device: torch.device) -> GradScaler:
    """Build the gradient scaler, which is disabled unless autocast uses float16."""
    return GradScaler(device.type, enabled=cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16")


@as_config_error
def build_schedule(cfg: CfgNode, steps_per_epoch: int) -> Schedule:
    """Build the learning-rate schedule from the keys in SOLVER and OPTIM."""
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
