"""Build an optimizer by name."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from vil.optim import OPTIMIZERS
from vil.optim.optimizers import Settings, can_fuse


def build_optimizer(
    name: str,
    groups: list[dict],
    *,
    lr: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nu: float = 1.0,
    own: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Build the optimizer `name` over the parameter groups of `decay_groups`.

    Each optimizer reads those of momentum, betas, eps and nu that it has. `own` are the arguments
    that its registry entry names in `keys`. Raises ValueError for an unknown name, for an apex_*
    name without apex, and for a model without a trainable parameter.
    """
    build = OPTIMIZERS.load(name)
    if not groups:
        raise ValueError("nothing to optimize: every parameter of the model is frozen")
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    settings = Settings(lr, momentum, betas, eps, nu, can_fuse(parameters), sharded)
    return build(groups, settings, **(own or {}))
