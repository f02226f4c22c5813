"""Weights for another image size, window or number of global tokens.

Rules: "linear", the reference's, without aligned corners; "bicubic", antialiased, which smooths
less where a table grows and keeps what would fall between samples where it shrinks; "extend", which
keeps relative positions at their distance in tokens, for another window on images of the same size.
"""

import torch
from torch import Tensor, nn

# parameters of global tokens: the dimensions that count them
GLOBAL = {
    "cls_token": (1,),
    "cls_pos_embed": (1,),
    "g2l_relative_position_bias": (2,),
    "g2g_relative_position_bias": (1, 2),
}


def resized(
    owner: nn.Module, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
) -> Tensor | None:
    """Resize a value for the owner's parameter `leaf`; None if it cannot be resized.

    The owner decides: the absolute embedding, or an attention with its own parameters.
    """
    if value.shape == shape:
        return value
    resize = getattr(owner, "resize_weight", None)
    return resize(leaf, value, shape, rule) if resize else None


def repeated(leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """A single global token's value for several of them, None for other parameters."""
    if leaf not in GLOBAL or value.ndim != len(shape) or not shape.numel():
        return None
    single = [1 if at in GLOBAL[leaf] else size for at, size in enumerate(shape)]
    return value.expand(shape) if list(value.shape) == single else None
