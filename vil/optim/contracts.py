"""Try out an optimizer that a user registers, to report a mistake before training starts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vil.optim.optimizers import Settings
from vil.optim.param_groups import decay_groups


def try_optimizer(name: str, build: Callable, own: Mapping[str, Any]) -> None:
    """Build the optimizer on two parameters and take one step. Raises ValueError if it fails."""
    named = [("weight", nn.Parameter(torch.ones(2, 3))), ("bias", nn.Parameter(torch.ones(3)))]
    groups = decay_groups(named, 0.1, 0.0, {"bias"})
    before = [parameter.detach().clone() for _, parameter in named]
    try:
        optimizer = build(groups, Settings(lr=0.1), **own)
    except Exception as error:
        raise ValueError(
            f"optimizer {name!r}: build(groups, settings, **own) raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer {name!r}: build must return a torch.optim.Optimizer, not "
            f"{type(optimizer).__name__}"
        )
    names = [group.get("param_names") for group in optimizer.param_groups]
    if names != [["weight"], ["bias"]] or any(
        key not in group for group in optimizer.param_groups for key in ("lr", "lr_scale")
    ):
        raise ValueError(
            f"optimizer {name!r} must keep each group with its 'param_names', 'lr' and 'lr_scale', "
            "which checkpoints and schedules use: pass `groups` to torch's Optimizer unchanged"
        )
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"optimizer {name!r}: step() raises {type(error).__name__}: {error}"
        ) from error
    for (parameter_name, parameter), old in zip(named, before):
        if not parameter.isfinite().all() or torch.equal(parameter, old):
            raise ValueError(
                f"optimizer {name!r}: a step with gradient 1 must change every parameter to finite "
                f"values, but {parameter_name} is {parameter.flatten()[0].item():g} after it"
            )
