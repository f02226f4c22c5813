"""Linear layers computed by oneDNN, with weights in the memory layout of its kernels.

Shapes: ... leading dimensions, I input and O output features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

PART_BYTES = 6 * 2**20  # hidden activations of the tokens that are processed at a time
# {activation: oneDNN's (activation, algorithm)}
ACTIVATIONS = {"": ("none", ""), "gelu": ("gelu", "none"), "relu": ("relu", "")}


def pack(weight: Tensor) -> Tensor:
    """Return weights (O, I), float32 or bfloat16, in the memory layout of oneDNN's kernels."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    """Apply a linear layer and an activation to x (..., I), without gradients. Returns (..., O).

    packed: weights from `pack`. activation: "gelu" (exact), "relu", or "" for none. oneDNN applies
    the activation while the outputs are in the CPU cache.
    """
    name, algorithm = ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)


def apply_in_parts(function: Callable[[Tensor], Tensor], x: Tensor, hidden: int) -> Tensor:
    """Return function(x) for x (..., I), computed for a few tokens at a time.

    The activations inside the function then stay in the CPU cache. function: must compute each
    token independently of the others. hidden: the largest number of features of a token inside the
    function.
    """
    rows = max(1, PART_BYTES // (hidden * x.itemsize))
    if x.numel() <= rows * x.shape[-1]:
        return function(x)
    parts = [function(part) for part in x.flatten(0, -2).split(rows)]
    return torch.cat(parts).unflatten(0, x.shape[:-1])
