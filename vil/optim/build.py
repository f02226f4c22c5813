"""Build the optimizer, gradient scaler and learning-rate schedule of a config."""

import logging
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves
from vil.config.unused_keys import warn_unused
from vil.optim import OPTIMIZERS, SCHEDULES, Schedule, build_optimizer, decay_groups
from vil.optim.learning_rates import ScaledLr, default_scaling, scale_lr
from vil.optim.param_groups import find_no_decay_params, number_layers
from vil.utils.errors import as_config_error

START_SHARE = 0.1  # of the initial weights in the final average, above which OPTIM.EMA is too large

log = logging.getLogger(__name__)


class Optimization(NamedTuple):
    """Optimizer and gradient scaler of a training run, and the learning rates of its schedule."""

    optimizer: Optimizer
    scaler: GradScaler
    name: str  # the optimizer's name, which checkpoints store
    lr: ScaledLr


@as_config_error
def build_optimization(cfg: CfgNode, model: nn.Module, device: torch.device) -> Optimization:
    """Build the optimizer with its parameter groups, and the gradient scaler.

    The weight decay is OPTIM.WD0 for some parameters and OPTIM.WD for all others. In an MsViT,
    OPTIM.WD0 is for norms, position parameters, global tokens and the head's bias. In other models,
    it is for scalars, vectors and the parameters that the model's `no_weight_decay()` names.

    If OPTIM.LAYER_DECAY < 1, each layer has its own groups. The scaler is disabled unless autocast
    uses float16.
    """
    optim = cfg.OPTIM
    entry = OPTIMIZERS.entry(optimizer_name(optim.OPT, use_larc=cfg.SOLVER.USE_LARC))
    lr = scale_lr(
        optim.LR,
        cfg.SOLVER.MIN_LR,
        batch_size=cfg.DATALOADER.BSZ * optim.ACCUMULATE,
        reference=optim.LR_REFERENCE_BATCH,
        scaling=default_scaling(entry.name) if optim.LR_SCALING == "auto" else optim.LR_SCALING,
    )
    if count := cfg.FINETUNE.FREEZE_STAGES:
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        total, trained = sum(size for size, _ in sizes), sum(size for size, is_on in sizes if is_on)
        text = "FINETUNE.FREEZE_STAGES %d: %s of %s parameters are trained"
        log.info(text, count, f"{trained:,}", f"{total:,}")
    groups = decay_groups(
        model.named_parameters(),
        optim.WD,
        optim.WD0,
        find_no_decay_params(model),
        layers=number_layers(model) if optim.LAYER_DECAY < 1 else None,
        layer_decay=optim.LAYER_DECAY,
    )
    optimizer = build_optimizer(
        entry.name,
        groups,
        lr=lr.peak,
        momentum=optim.MOM,
        nu=optim.NU,
        betas=(optim.ADAM.BETA1, optim.ADAM.BETA2),
        eps=optim.ADAM.EPS,
        own=entry.read_settings(leaves(cfg)),
    )
    scaler = GradScaler(device.type, enabled=cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16")
    return Optimization(optimizer, scaler, entry.name, lr)


def optimizer_name(opt: str, *, use_larc: bool) -> str:
    """Return the optimizer's name in the registry OPTIMIZERS, from the values of OPTIM.OPT and
    SOLVER.USE_LARC."""
    return "larc" if use_larc else opt


@as_config_error
def build_schedule(cfg: CfgNode, optimizer: str, lr: ScaledLr, steps_per_epoch: int) -> Schedule:
    """Build the learning-rate schedule of an optimizer. optimizer, lr: `name` and `lr` of its
    `Optimization`.

    Logs the peak learning rate if it is scaled to the batch size. Warns if OPTIM.LR is the default
    of SGD with another optimizer, and of other keys whose values are probably mistakes.
    """
    optim, solver = cfg.OPTIM, cfg.SOLVER
    if lr.rule:
        log.info("peak learning rate %g = OPTIM.LR %g x %s", lr.peak, optim.LR, lr.rule)
    if KEYS["OPTIM.LR"].default == optim.LR and default_scaling(optimizer) == "sqrt":
        log.warning("OPTIM.LR is %g, the default, which is too high for %s", optim.LR, optimizer)
    factor = optim.DROP_FACTOR
    if factor < 1 and (optim.VAL or solver.LR_POLICY == "multistep"):
        text = "OPTIM.DROP_FACTOR is a divisor: %g multiplies the learning rate by %g; set %g"
        log.warning(text, factor, 1 / factor, 1 / factor)
    if solver.LR_POLICY == "multistep":
        drops = optim.DROP_EPOCHS or [optim.DROP_FREQ]
        if late := [epoch for epoch in drops if epoch >= optim.EPOCHS]:
            log.warning(
                "OPTIM.%s %s: the learning rate does not drop there, because the run ends after "
                "OPTIM.EPOCHS %d",
                "DROP_EPOCHS" if optim.DROP_EPOCHS else "DROP_FREQ",
                ", ".join(f"{epoch:g}" for epoch in late),
                optim.EPOCHS,
            )
    if not solver.LR_POLICY and solver.WARMUP_EPOCHS:
        names = [f"SOLVER.WARMUP_{name}" for name in ("EPOCHS", "FACTOR", "METHOD")]
        warn_unused(cfg, "SOLVER.LR_POLICY is empty", names)
    return Schedule(
        solver.LR_POLICY,
        lr.peak,
        steps_per_epoch,
        optim.EPOCHS,
        warmup_epochs=solver.WARMUP_EPOCHS,
        warmup_factor=solver.WARMUP_FACTOR,
        warmup_method=solver.WARMUP_METHOD,
        min_lr=lr.final,
        drop_freq=optim.DROP_FREQ,
        drop_epochs=tuple(optim.DROP_EPOCHS),
        drop_factor=factor,
        epoch_based=solver.EPOCH_BASED_SCHEDULE,
        own=SCHEDULES.entry(solver.LR_POLICY).read_settings(leaves(cfg)),
    )


def warn_long_average(cfg: CfgNode, steps_per_epoch: int) -> None:
    """Warn if OPTIM.EMA averages over more steps than the run has, so that a large part of the
    final average is the initial weights."""
    decay, steps = cfg.OPTIM.EMA, cfg.OPTIM.EPOCHS * steps_per_epoch
    if (share := decay**steps) > START_SHARE:
        log.warning(
            "OPTIM.EMA %g is too large for a run of %d steps: %.0f %% of the averaged weights, "
            "which are evaluated and kept, are the initial ones: set OPTIM.EMA to at most %.3g, or "
            "to 0",
            decay,
            steps,
            100 * share,
            math.floor(1000 * (START_SHARE / 10) ** (1 / steps)) / 1000,
        )
