"""Build an optimizer by name; the built-in ones, each a function build(groups, settings)."""

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import Lamb, Lars
from torch.optim import Optimizer

from vil.optim import OPTIMIZERS
from vil.optim.qhm import QHM

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings that optimizers share. Weight decay belongs to the parameter groups."""

    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nu: float = 1.0
    fused: bool = False  # torch can update these parameters in one kernel
    sharded: bool = False  # by FSDP2, for which torch has no fused SGD


def build_optimizer(
    name: str, groups: list[dict], own: Mapping[str, Any] | None = None, **settings: Any
) -> Optimizer:
    """Build the optimizer `name` over the parameter groups of `decay_groups`.

    settings: lr, momentum, betas, eps and nu, of which each optimizer reads those that it has.
    own: the arguments that its registry entry names in `keys`. Raises ValueError for an unknown
    name, for an apex_* name without apex, and for a model without a trainable parameter.
    """
    build = OPTIMIZERS.load(name)
    if not groups:
        raise ValueError("nothing to optimize: every parameter of the model is frozen")
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return build(groups, Settings(fused=fused, sharded=sharded, **settings), **(own or {}))


def adamw(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def adam(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.Adam(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def sgd(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, fused=s.fused and not s.sharded)


def qhm(groups: list[dict], s: Settings) -> Optimizer:
    return QHM(groups, lr=s.lr, momentum=s.momentum, nu=s.nu)


def lamb(groups: list[dict], s: Settings) -> Optimizer:
    """LAMB (arXiv:1904.00962) with bias correction, without timm's clipping of all gradients."""
    warn_without_decay(groups, "lamb is Adam")
    return Lamb(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=None)


def lars(groups: list[dict], s: Settings) -> Optimizer:
    """LARS (arXiv:1708.03888): learning rate lr * 0.001 |p| / (|g| + weight_decay |p|)."""
    warn_without_decay(groups, "lars is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps)


def larc(groups: list[dict], s: Settings) -> Optimizer:
    """NVIDIA's clipped LARS: a layer's learning rate is
    min(lr, 0.001 |p| / (|g| + weight_decay |p|)). Where lr is smaller, it is SGD with momentum."""
    warn_without_decay(groups, "larc is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps, trust_clip=True)


def apex_lamb(groups: list[dict], s: Settings) -> Optimizer:
    """`lamb` by apex. Its clipping of all gradients to norm 1 is switched off too."""
    make = import_apex("FusedLAMB")
    warn_without_decay(groups, "apex_lamb is Adam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=math.inf)


def apex_adam(groups: list[dict], s: Settings) -> Optimizer:
    """`adam` by apex, whose default is adamw."""
    make = import_apex("FusedAdam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, adam_w_mode=False)


def warn_without_decay(groups: list[dict], consequence: str) -> None:
    """Warn if no group has weight decay. timm and apex adapt a layer's learning rate only in groups
    with it; norms and biases, whose small norms would nearly stop them, keep the full one."""
    if not any(group["weight_decay"] for group in groups):
        log.warning("without weight decay no layer's learning rate is adapted: %s", consequence)


def import_apex(name: str) -> Callable[..., Optimizer]:
    """An optimizer class of NVIDIA's apex. Raises ValueError if apex is not installed."""
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} needs NVIDIA's apex, which is not installed: build it from the repository "
            "NVIDIA/apex on GitHub (the package `apex` on PyPI is an unrelated one)"
        ) from error
