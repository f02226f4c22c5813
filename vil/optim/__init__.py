"""Optimizers by name, and learning-rate schedules as pure functions of the step.

A new optimizer is a function and a row in OPTIMIZERS; a new schedule is one in SCHEDULES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from vil.optim.groups import decay_groups
from vil.optim.schedules import SCHEDULES, Schedule
from vil.utils.table import lookup

__all__ = ["OPTIMIZERS", "SCHEDULES", "Schedule", "build_optimizer", "decay_groups"]


@dataclass(frozen=True)
class Settings:
    """What a row of OPTIMIZERS may use. Weight decay is not here: it belongs to the groups."""

    lr: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    fused: bool


def adamw(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def adam(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.Adam(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=s.fused)


def sgd(groups: list[dict], s: Settings) -> Optimizer:
    return torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, fused=s.fused)


OPTIMIZERS: dict[str, Callable[[list[dict], Settings], Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
}


def build_optimizer(
    name: str,
    groups: list[dict],
    *,
    lr: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Optimizer:
    """The optimizer `name` over `groups`, which `decay_groups` makes (parameters with names).

    Each optimizer takes what it has of momentum, betas and eps. Raises ValueError for an unknown
    name and for a model without a trainable parameter.
    """
    make = lookup(OPTIMIZERS, name, "optimizer")
    if not groups:
        raise ValueError("nothing to optimize: every parameter of the model is frozen")
    return make(groups, Settings(lr, momentum, betas, eps, fused_works(groups)))


def fused_works(groups: list[dict]) -> bool:
    """Whether torch's one-kernel update takes these parameters: it saves one pass per operation."""
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
