"""Validate the optimizers and learning-rate schedules that a user registers."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vil.optim.optimizers import Settings
from vil.optim.param_groups import decay_groups
from vil.utils.registry import Entry, Key


def check_optimizer(build: Callable, entry: Entry) -> None:
    """Build an optimizer for two parameters and take one step. Raises ValueError if that fails.

    build: function that builds the optimizer, see `register_optimizer`. The call is build(groups,
    settings, **own), where `own` has the arguments for new config keys (`Key`), with the defaults
    of these keys. All other arguments of `build` must have defaults.
    entry: registry entry of the optimizer.
    """
    own = {a: key.default for a, key in entry.keys.items() if isinstance(key, Key)}
    named = [("weight", nn.Parameter(torch.ones(2, 3))), ("bias", nn.Parameter(torch.ones(3)))]
    groups, what = decay_groups(named, 0.1, 0.0, {"bias"}), f"optimizer {entry.name!r}"
    call = f"{what}: build(groups, settings, **own)"
    optimizer = try_call(call, lambda: build(groups, Settings(lr=0.1), **own))
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"{what}: `build` must return a torch.optim.Optimizer, not {kind}")
    names = [group.get("param_names") for group in optimizer.param_groups]
    if names != [["weight"], ["bias"]] or any(
        key not in group for group in optimizer.param_groups for key in ("lr", "lr_scale")
    ):
        raise ValueError(
            f"{what} must keep 'param_names', 'lr' and 'lr_scale' in each parameter group, because "
            "checkpoints and schedules use them: pass `groups` to torch's Optimizer unchanged"
        )
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    try_call(f"{what}: step()", optimizer.step)
    for name, p in named:
        if not p.isfinite().all() or (p == 1).all():
            raise ValueError(
                f"{what}: a step must change every parameter and keep all values finite. In a test "
                f"with parameters and gradients of 1, the first value of {name} is "
                f"{p.flatten()[0].item():g} after the step"
            )


def try_call(call: str, function: Callable[[], Any]) -> Any:
    """Call `function` and return its result. Raises ValueError if the call raises an exception.

    call: description of the call, such as "optimizer 'x': step()", for the error message.
    """
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{call} raises {type(error).__name__}: {error}") from error


def check_schedule(function: Callable, entry: Entry) -> None:
    """Raise ValueError if a schedule function cannot be called as the training loop calls it.

    The call is function(schedule, time, **arguments). entry: registry entry of the schedule.
    `entry.keys` has the names of the additional arguments.
    """
    try:
        inspect.signature(function).bind(None, 0, **dict.fromkeys(entry.keys))
    except (TypeError, ValueError) as error:
        called = ", ".join(["schedule", "time", *(f"{argument}=..." for argument in entry.keys)])
        raise ValueError(
            f"schedule {entry.name!r} must accept the call f({called}): {error}"
        ) from error
