"""Detect what the fused attention operators do not support: torch.func transforms, forward-mode AD,
and tracing for export.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
T = TypeVar("T")


def is_exporting() -> bool:
    """Return whether torch.export or torch.jit.trace is tracing.

    torch.compiler.is_exporting() is not used: in torch 2.11 it is also True under torch.compile.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.jit.is_tracing()


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a torch.func transform is active or a tensor has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run in a new thread, outside of the caller's torch modes.

    torch.func transforms, fake tensors, tracers and inference mode apply to one thread only. So
    tensors that the function creates are ordinary ones, whose values can be read and cached.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return run
