"""Linear layers by oneDNN, with weights in the memory layout of its kernels.

Shapes: ... leading dimensions, I input and O output features.
"""

import torch
from torch import Tensor

# {activation: oneDNN's (activation, algorithm)}
ACTIVATIONS = {"": ("none", ""), "gelu": ("gelu", "none"), "relu": ("relu", "")}


def pack(weight: Tensor) -> Tensor:
    """Return weights (O, I), float32 or bfloat16, in the memory layout of oneDNN's kernels."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    """Map x (..., I) to (..., O), without gradients.

    packed: result of `pack`. activation: "gelu" (exact), "relu", or "" for none. oneDNN applies it
    while the outputs are in the CPU cache.
    """
    name, algorithm = ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)
