"""Quasi-hyperbolic momentum (Ma and Yarats, arXiv:1810.06801, equations 3 and 4).

Update of a parameter p with gradient g and momentum buffer h, which starts at zero:

    g <- g + weight_decay * p      h <- momentum * h + (1 - momentum) * g
    p <- p - lr * ((1 - nu) * g + nu * h)

nu=0 is plain SGD. nu=1 is SGD with momentum and a learning rate of (1 - momentum) * lr. To use an
SGD recipe with nu=1, divide the learning rate of the recipe by (1 - momentum).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class QHM(Optimizer):
    """Optimizer with quasi-hyperbolic momentum (arXiv:1810.06801), which includes SGD (nu = 0).

    nu: weight of the momentum buffer in the update. The gradient has the weight 1 - nu. The
    optimizer state of a parameter is its `momentum_buffer`.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        nu: float = 1.0,
        weight_decay: float = 0.0,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"qhm needs 0 <= momentum < 1, got momentum {momentum}")
        super().__init__(params, dict(lr=lr, momentum=momentum, nu=nu, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. Returns the loss from `closure`, or None if there is no closure.

        The gradients are not changed.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.update(params, group)
        return loss

    def update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum_buffer"] for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, params, alpha=group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        mixed = torch._foreach_lerp(gradients, averages, group["nu"])
        torch._foreach_add_(params, mixed, alpha=-group["lr"])
