"""Weights for another image size, window or number of global tokens.

Rules: "linear", the reference's, without aligned corners; "bicubic", antialiased, which smooths
less where a table grows and keeps what would fall between samples where it shrinks; "extend", which
keeps relative positions at their distance in tokens, for another window on images of the same size.
"""

import math

import torch
from torch import Tensor, nn

from vil.layers.attention.linformer import resize_projection
from vil.layers.pos_embed import resize_table

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
    """A value for the owner's parameter `leaf` in the wanted shape, None where that cannot be.

    Absolute embeddings are resized by their owner's rule. So are tables of positions, and
    linformer's projections: of square grids, as files do not say which.
    """
    if value.shape == shape:
        return value
    if leaf in ("x_pos_embed", "y_pos_embed") and value.ndim == 3 and value.shape[2] == shape[2]:
        crops_too_little = owner.resize == "crop" and shape[1] > value.shape[1]
        return None if crops_too_little else owner.fit(value.double(), shape[1], rule)
    if value.ndim != 2 or value.shape[1:] != shape[1:]:
        return None
    if leaf == "local_relative_position_bias_table":
        old, new = _side(len(value)), _sides(owner, shape[0])
        return resize_table(value.double(), (old, old), new, rule) if old and new else None
    if leaf in ("proj_k", "proj_v"):
        old, num_global = _side(len(value) - owner.num_global), owner.num_global
        if old:
            return resize_projection(value.double(), (old, old), owner.grid, num_global, rule)
    return None


def repeated(leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """A single global token's value for several of them, None for other parameters."""
    if leaf not in GLOBAL or value.ndim != len(shape) or not shape.numel():
        return None
    single = [1 if at in GLOBAL[leaf] else size for at, size in enumerate(shape)]
    return value.expand(shape) if list(value.shape) == single else None


def _sides(owner: nn.Module, area: int) -> tuple[int, int] | None:
    """Rows and columns of the owner's table of positions: its own, or those of a square."""
    side = _side(area)
    return getattr(owner, "table_size", (side, side) if side else None)


def _side(area: int) -> int:
    """The side of a square, 0 if it is none."""
    side = math.isqrt(max(area, 0))
    return side if side * side == area else 0
