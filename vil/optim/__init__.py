"""Optimizers by name, and learning-rate schedules as pure functions of the step.

A new optimizer is a function and a row in OPTIMIZERS; a new schedule is one in SCHEDULES. Weight
decay is added to the gradient (L2), except in adamw, where it shrinks the weights, and in both
kinds of lamb, where it joins the update.
"""

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.optim import Lamb, Lars
from torch import Tensor
from torch.optim import Optimizer

from vil.optim.ema import Ema
from vil.optim.param_groups import decay_groups
from vil.optim.qhm import QHM
from vil.optim.schedules import SCHEDULES, Schedule
from vil.utils.lookup import lookup

__all__ = ["OPTIMIZERS", "SCHEDULES", "Ema", "Schedule", "build_optimizer", "decay_groups"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a row of OPTIMIZERS may use. Weight decay is not here: it belongs to the groups."""

    lr: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    nu: float
    fused: bool
    spread: bool  # parameters are slices of ranks (FSDP2), for which torch has no fused SGD


def adamw(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def adam(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.Adam(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def sgd(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, fused=s.fused and not s.spread)


def qhm(groups: list[dict], s: Settings) -> Optimizer:
    return QHM(groups, lr=s.lr, momentum=s.momentum, nu=s.nu)


def lamb(groups: list[dict], s: Settings) -> Optimizer:
    """arXiv:1904.00962, with Adam's bias correction. timm would also clip all gradients to norm 1,
    which the paper does not: the loop clips, where it is told to.
    """
    warn_without_decay(groups, "lamb is Adam")
    return Lamb(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=None)


def lars(groups: list[dict], s: Settings) -> Optimizer:
    """arXiv:1708.03888: a layer's rate is lr * 0.001 |p| / (|g| + weight_decay |p|)."""
    warn_without_decay(groups, "lars is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps)


def larc(groups: list[dict], s: Settings) -> Optimizer:
    """NVIDIA's clipped form of lars: a layer's rate is the smaller one of lr and
    0.001 |p| / (|g| + weight_decay |p|). So it is SGD with momentum wherever lr is the smaller.
    """
    warn_without_decay(groups, "larc is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps, trust_clip=True)


def apex_lamb(groups: list[dict], s: Settings) -> Optimizer:
    """As `lamb`: its own clipping of all gradients to norm 1 is switched off here too."""
    make = from_apex("FusedLAMB")
    warn_without_decay(groups, "apex_lamb is Adam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=math.inf)


def apex_adam(groups: list[dict], s: Settings) -> Optimizer:
    """As `adam`, not adamw: apex's own default is the latter."""
    make = from_apex("FusedAdam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, adam_w_mode=False)


OPTIMIZERS: dict[str, Callable[[list[dict], Settings], Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "qhm": qhm,
    "lamb": lamb,
    "lars": lars,
    "larc": larc,
    "apex_lamb": apex_lamb,
    "apex_adam": apex_adam,
}


def build_optimizer(
    name: str,
    groups: list[dict],
    *,
    lr: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nu: float = 1.0,
) -> Optimizer:
    """The optimizer `name` over `groups`, which `decay_groups` makes (parameters with names).

    Each optimizer takes what it has of momentum, betas, eps and nu. Raises ValueError for an
    unknown name, for one of apex where that is not installed, and for a model without a trainable
    parameter.
    """
    make = lookup(OPTIMIZERS, name, "optimizer")
    if not groups:
        raise ValueError("nothing to optimize: every parameter of the model is frozen")
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    spread = any(hasattr(parameter, "to_local") for parameter in parameters)
    return make(groups, Settings(lr, momentum, betas, eps, nu, fused_works(parameters), spread))


def fused_works(parameters: list[Tensor]) -> bool:
    """Whether torch's one-kernel update takes these parameters: it saves one pass per operation."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def warn_without_decay(groups: list[dict], consequence: str) -> None:
    """timm and apex adapt the rate of a layer only in groups with weight decay: norms and biases,
    whose small norms would stop them, go at the full rate. Without any decay nothing is adapted.
    """
    if not any(group["weight_decay"] for group in groups):
        log.warning("without weight decay no layer's rate is adapted: %s", consequence)


def from_apex(name: str) -> Callable[..., Optimizer]:
    """An optimizer of NVIDIA's apex, or a ValueError that says where apex comes from."""
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} needs NVIDIA's apex, which is not installed: build it from the repository "
            "NVIDIA/apex on GitHub (the package `apex` on PyPI is an unrelated one)"
        ) from error
