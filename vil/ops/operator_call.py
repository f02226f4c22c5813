"""Call this package's torch operators with little overhead in inference."""

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from vil.utils.transforms import is_exporting


def call_operator(operator: CustomOpDef, x: Tensor, *arguments: Any) -> Any:
    """Call an operator whose first argument is x.

    Calls its Python function directly if neither autograd, nor a tracer, transform or profiler,
    has to see the call. torch's dispatcher takes 30 to 100 microseconds, as long as some operators
    of a model with a single image.
    """
    watched = (
        torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.is_meta
        or torch.compiler.is_compiling()
        or is_exporting()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )
    return (operator if watched else operator._init_fn)(x, *arguments)
