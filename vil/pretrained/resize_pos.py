"""Resize weights for another image size, window or number of global tokens.

Rules: "linear" is the 2021 reference's (bilinear, corners not aligned). "bicubic" is antialiased:
sharper where a table grows, no aliasing where it shrinks. "extend" keeps each relative position at
its distance in tokens, for another window on images of the same size.
"""

import torch
from torch import Tensor, nn

# parameters of global tokens -> dimensions of size G
GLOBAL = {
    "cls_token": (1,),
    "cls_pos_embed": (1,),
    "g2l_relative_position_bias": (2,),
    "g2g_relative_position_bias": (1, 2),
}


def resize_parameter(
    owner: nn.Module, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
) -> Tensor | None:
    """Resize a value for the owner's parameter `leaf` to `shape`; None if there is no rule.

    The rule is the owner's `resize_weight`: of absolute embeddings and attention classes.
    """
    if value.shape == shape:
        return value
    resize = getattr(owner, "resize_weight", None)
    return resize(leaf, value, shape, rule) if resize else None


def repeat_global(leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """Repeat the value of a single global token for several; None for other parameters."""
    if leaf not in GLOBAL or value.ndim != len(shape) or not shape.numel():
        return None
    single = [1 if dim in GLOBAL[leaf] else size for dim, size in enumerate(shape)]
    return value.expand(shape) if list(value.shape) == single else None
