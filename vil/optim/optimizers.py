"""Build optimizers by name: `build_optimizer`, and one function for each built-in optimizer."""

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
    """Common settings of optimizers. An optimizer ignores those that it does not support.

    nu: weight of the momentum buffer in `QHM`. fused: whether torch's fused implementation may be
    used. sharded: whether FSDP2 shards the parameters.
    """

    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nu: float = 1.0
    fused: bool = False  # torch can update these parameters in one kernel
    sharded: bool = False  # torch has no fused SGD for sharded parameters


def build_optimizer(
    name: str, groups: list[dict], own: Mapping[str, Any] | None = None, **settings: Any
) -> Optimizer:
    """Build the optimizer `name` for the parameter groups from `decay_groups`.

    own: keyword arguments of this optimizer only. settings: lr (required), momentum, betas, eps and
    nu of `Settings`. An optimizer ignores those that it does not support.
    Raises ValueError if the optimizer is unknown or unsupported, if it needs apex and apex is not
    installed, or if there are no trainable parameters.
    """
    check_usable(name)
    build = OPTIMIZERS.load(name)
    if not groups:
        raise ValueError("there is nothing to train: every parameter of the model is frozen")
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return build(groups, Settings(fused=fused, sharded=sharded, **settings), **(own or {}))


def check_usable(name: str) -> None:
    """Raise ValueError if an optimizer is unknown, or if training does not support it."""
    if reason := OPTIMIZERS.entry(name).facts.get("refused"):
        raise ValueError(f"training does not support the optimizer {name}: {reason}")


def adamw(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def adam(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.Adam(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def sgd(groups: list[dict], s: Settings) -> Optimizer:
    """Build SGD. Its momentum begins with zeros, which is the same with dampening 0: in a first
    step that is skipped, torch's fused kernel would leave memory uninitialized there."""
    fused = s.fused and not s.sharded
    optimizer = torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, fused=fused)
    for group in optimizer.param_groups if fused and s.momentum else ():
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def qhm(groups: list[dict], s: Settings) -> Optimizer:
    return QHM(groups, lr=s.lr, momentum=s.momentum, nu=s.nu)


def lamb(groups: list[dict], s: Settings) -> Optimizer:
    """Build LAMB (arXiv:1904.00962) with bias correction, without clipping the gradient norm."""
    warn_without_decay(groups, "lamb is Adam")
    return Lamb(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=None)


def lars(groups: list[dict], s: Settings) -> Optimizer:
    """Build LARS (arXiv:1708.03888).

    The learning rate of a parameter tensor p with gradient g is
    lr * 0.001 |p| / (|g| + weight_decay |p|), where |.| is the L2 norm.
    """
    warn_without_decay(groups, "lars is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps)


def larc(groups: list[dict], s: Settings) -> Optimizer:
    """Build LARC, NVIDIA's clipped LARS.

    The learning rate of a parameter tensor p with gradient g is
    min(lr, 0.001 |p| / (|g| + weight_decay |p|)), where |.| is the L2 norm. If this minimum is lr,
    the update is that of SGD with momentum.
    """
    warn_without_decay(groups, "larc is SGD")
    return Lars(groups, lr=s.lr, momentum=s.momentum, eps=s.eps, trust_clip=True)


def apex_lamb(groups: list[dict], s: Settings) -> Optimizer:
    """Build apex's FusedLAMB, without apex's default clipping of the gradient norm to 1."""
    make = import_apex("FusedLAMB")
    warn_without_decay(groups, "apex_lamb is Adam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, max_grad_norm=math.inf)


def apex_adam(groups: list[dict], s: Settings) -> Optimizer:
    """Build apex's FusedAdam, with weight decay added to the gradient (L2)."""
    make = import_apex("FusedAdam")
    return make(groups, lr=s.lr, betas=s.betas, eps=s.eps, adam_w_mode=False)


def warn_without_decay(groups: list[dict], consequence: str) -> None:
    """Log a warning if no parameter group has weight decay.

    Without weight decay, LAMB, LARS and LARC of timm and apex do not adapt the learning rate to the
    layer. consequence: text for the warning that names the equivalent optimizer, such as "lars is
    SGD".
    """
    if not any(group["weight_decay"] for group in groups):
        log.warning(
            "no parameter group has weight decay. Without it, %s: the learning rates of the layers "
            "are not adapted. To adapt them, set OPTIM.WD above 0",
            consequence,
        )


def import_apex(name: str) -> Callable[..., Optimizer]:
    """Import and return the optimizer class `name` of NVIDIA's apex.

    Raises ValueError if apex is not installed.
    """
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} needs NVIDIA's apex, which is not installed: build it from the repository "
            "NVIDIA/apex on GitHub (the package `apex` on PyPI is unrelated)"
        ) from error
