"""Call this package's torch operators with little overhead.

For operators written in Python, torch's dispatcher and autograd take 30 to 150 microseconds per
call. In a small model or on a single image, the computation of some operators takes no longer than
that.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.library import CustomOpDef
from torch.nn import Parameter

from vil.utils.transforms import is_exporting

# a FunctionCtx of autograd, whose type does not declare what functions store in it
Context = Any


def call_operator(operator: CustomOpDef, x: Tensor, *arguments: Any) -> Any:
    """Call a torch operator with x and the other positional arguments, if possible without torch's
    dispatcher.

    The dispatcher is used if x is on another device than a CPU or a CUDA GPU, if a tracer,
    transform, mode, profiler or tensor subclass must see the call, or if an input requires a
    gradient that the operator does not define.
    """
    tensors = [argument for argument in (x, *arguments) if isinstance(argument, Tensor)]
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # without a gradient of its own, the operator raises in the backward pass
    lacks_gradient = differentiates and not operator._backward_fn
    if lacks_gradient or not (x.is_cpu or x.is_cuda) or is_watched(*tensors):
        return operator(x, *arguments)
    call = _differentiable(operator) if differentiates else operator._init_fn
    return call(x, *arguments)


def is_watched(*tensors: Tensor) -> bool:
    """Return whether a call with these tensors must be made through torch's dispatcher.

    This is the case if a tracer, transform, mode, profiler or tensor subclass must see the call.
    """
    return (
        any(type(tensor) not in (Tensor, Parameter) for tensor in tensors)
        or torch.compiler.is_compiling()
        or is_exporting()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


@cache
def _differentiable(operator: CustomOpDef) -> Callable:
    """Return a differentiable function that runs the forward and backward pass of an operator."""

    def forward(ctx: Context, *arguments: Any) -> Any:
        output = operator._init_fn(*arguments)
        # pyrefly: ignore[not-callable]  # not None in an operator with a gradient
        operator._setup_context_fn(ctx, arguments, output)
        return output

    backward: Any = operator._backward_fn  # not None, see `call_operator`
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(operator._name, (Function,), methods)
    return function.apply


def differentiable_gradients(
    y: Tensor, inputs: Sequence[Tensor | None], dy: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the inputs that `needs` selects, None for the others.

    The gradients can be differentiated. y: a function of the inputs, computed with PyTorch's
    operators. dy: the gradient of y.
    """
    needed = [x for x, need in zip(inputs, needs) if need and x is not None]
    if not needed:
        return [None] * len(inputs)
    grads = iter(torch.autograd.grad(y, needed, dy.to(y.dtype), create_graph=True))
    return [next(grads) if need else None for need in needs]
