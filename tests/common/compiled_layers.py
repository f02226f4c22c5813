"""Checks of operations that compiled code may compute."""

from collections.abc import Callable

import torch
from torch import Tensor

import vil
from vil.config import get_config
from vil.ops.dispatch import CHOICES


def assert_traced_alike(compute: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor) -> None:
    """Tools that trace or transform a function give its outputs."""
    for traced in (
        torch.compile(compute, backend="eager", fullgraph=True),
        torch.func.vmap(compute),
        torch.jit.trace(compute, x, check_trace=False),
        lambda x: torch.func.jvp(compute, (x,), (x,))[0],
    ):
        torch.testing.assert_close(traced(x), wanted)


def assert_trains_alike() -> None:
    """vil_tiny has the same gradients with the tuned backends, which are then cleared, and
    without."""
    cfg = get_config("imagenet/vil_tiny.yaml", ["INPUT.IMAGE_SIZE", "64", "DATA.NUM_CLASSES", "5"])
    torch.manual_seed(0)
    model = vil.build_model(cfg)
    images = torch.randn(2, 3, 64, 64)
    grads = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)  # of stochastic depth
        model(images).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        CHOICES.clear()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-4)
