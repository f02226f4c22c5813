"""Build the optimizer, learning-rate schedule and gradient scaler of a config."""

import logging
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from yacs.config import CfgNode

from vil.config.access import own_settings, warn_unused
from vil.config.defaults import KEYS
from vil.optim import OPTIMIZERS, SCHEDULES, Schedule, decay_groups
from vil.optim import build_optimizer as optimizer_by_name
from vil.optim.learning_rates import default_scaling, lr_factor
from vil.optim.param_groups import find_no_decay_params, number_layers
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
    """Build the optimizer, the learning-rate schedule and the gradient scaler of a config.

    Logs the learning rate if it is scaled to the batch size, and warns if it is the default of SGD
    with another optimizer.
    """
    name, lr = optimizer_name(cfg), scaled_lr(cfg)
    if lr.rule:
        log.info("peak learning rate %g = OPTIM.LR %g x %s", lr.peak, cfg.OPTIM.LR, lr.rule)
    if KEYS["OPTIM.LR"].default == cfg.OPTIM.LR and default_scaling(name) == "sqrt":
        log.warning("OPTIM.LR is %g, the default, which is too high for %s", cfg.OPTIM.LR, name)
    drops, factor = cfg.OPTIM.VAL or cfg.SOLVER.LR_POLICY == "multistep", cfg.OPTIM.DROP_FACTOR
    if drops and factor < 1:
        text = "OPTIM.DROP_FACTOR is a divisor: %g multiplies the learning rate by %g; set %g"
        log.warning(text, factor, 1 / factor, 1 / factor)
    return Optimization(
        build_optimizer(cfg, model),
        build_schedule(cfg, steps_per_epoch),
        build_scaler(cfg, device),
        name,
    )


class ScaledLr(NamedTuple):
    """Learning rates after scaling to the batch size.

    peak: scaled OPTIM.LR. final: scaled SOLVER.MIN_LR. rule: the scaling factor as text, such as
    "512 / 1024 images", or "" without scaling.
    """

    peak: float
    final: float
    rule: str = ""


def scaled_lr(cfg: CfgNode) -> ScaledLr:
    """Return OPTIM.LR and SOLVER.MIN_LR, scaled from OPTIM.LR_REFERENCE_BATCH images per step to
    the config's number of images per step. If OPTIM.LR_REFERENCE_BATCH is 0, they are not scaled.
    """
    optim, final = cfg.OPTIM, cfg.SOLVER.MIN_LR
    if not optim.LR_REFERENCE_BATCH:
        return ScaledLr(optim.LR, final)
    auto = default_scaling(optimizer_name(cfg))
    scaling = auto if optim.LR_SCALING == "auto" else optim.LR_SCALING
    size, reference = cfg.DATALOADER.BSZ * optim.ACCUMULATE, optim.LR_REFERENCE_BATCH
    factor = lr_factor(size, reference, scaling)
    ratio = f"{size} / {reference} images" if scaling == "linear" else f"sqrt({size} / {reference})"
    return ScaledLr(optim.LR * factor, final * factor, ratio)


@as_config_error
def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer and its parameter groups.

    The weight decay is OPTIM.WD0 for some parameters and OPTIM.WD for all others. In an MsViT,
    OPTIM.WD0 is for norms, position parameters, global tokens and the head's bias. In other models,
    it is for scalars, vectors and the parameters that the model's `no_weight_decay()` names.

    If OPTIM.LAYER_DECAY < 1, each layer has its own groups.
    """
    optim = cfg.OPTIM
    entry = OPTIMIZERS.entry(optimizer_name(cfg))
    groups = decay_groups(
        model.named_parameters(),
        optim.WD,
        optim.WD0,
        find_no_decay_params(model),
        **(_layer_arguments(model) if optim.LAYER_DECAY < 1 else {}),
        layer_decay=optim.LAYER_DECAY,
    )
    return optimizer_by_name(
        entry.name,
        groups,
        lr=scaled_lr(cfg).peak,
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
    """Return two keyword arguments of `decay_groups` for layer-wise learning-rate decay.

    "layer_of": a function that maps the name of a parameter to the number of its layer.
    "num_layers": the largest layer number.
    """
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
    if not cfg.SOLVER.LR_POLICY and cfg.SOLVER.WARMUP_EPOCHS:
        names = [f"SOLVER.WARMUP_{name}" for name in ("EPOCHS", "FACTOR", "METHOD")]
        warn_unused(cfg, "SOLVER.LR_POLICY is empty", names)
    lr = scaled_lr(cfg)
    return Schedule(
        cfg.SOLVER.LR_POLICY,
        lr.peak,
        steps_per_epoch,
        cfg.OPTIM.EPOCHS,
        warmup_epochs=cfg.SOLVER.WARMUP_EPOCHS,
        warmup_factor=cfg.SOLVER.WARMUP_FACTOR,
        warmup_method=cfg.SOLVER.WARMUP_METHOD,
        min_lr=lr.final,
        drop_freq=cfg.OPTIM.DROP_FREQ,
        drop_epochs=tuple(cfg.OPTIM.DROP_EPOCHS),
        drop_factor=cfg.OPTIM.DROP_FACTOR,
        epoch_based=cfg.SOLVER.EPOCH_BASED_SCHEDULE,
        own=own_settings(cfg, SCHEDULES.entry(cfg.SOLVER.LR_POLICY)),
    )
