"""Resize weights for another image size, window or number of global tokens.

Rules: "linear" is the 2021 reference's (bilinear, corners not aligned). "bicubic" is antialiased:
sharper where a table grows, no aliasing where it shrinks. "extend" keeps each relative position at
its distance in tokens, for another window on images of the same size.
"""

import math

import torch
from torch import Tensor, nn

from vil.layers.attention.linformer import resize_projection
from vil.layers.pos_embed import resize_table

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

    Handles absolute embeddings (by their owner's `resize`), relative bias tables, and linformer's
    projections. Tables and projections in a file are taken to be of square grids.
    """
    if value.shape == shape:
        return value
    if leaf in ("x_pos_embed", "y_pos_embed") and value.ndim == 3 and value.shape[2] == shape[2]:
        is_too_short = owner.resize == "crop" and shape[1] > value.shape[1]
        return None if is_too_short else owner.fit(value.double(), shape[1], rule)
    if value.ndim != 2 or value.shape[1:] != shape[1:]:
        return None
    if leaf == "local_relative_position_bias_table":
        old, new = _square_side(len(value)), _table_size(owner, shape[0])
        return resize_table(value.double(), (old, old), new, rule) if old and new else None
    if leaf in ("proj_k", "proj_v"):
        old, num_global = _square_side(len(value) - owner.num_global), owner.num_global
        if old:
            return resize_projection(value.double(), (old, old), owner.grid, num_global, rule)
    return None


def repeat_global(leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """Repeat the value of a single global token for several; None for other parameters."""
    if leaf not in GLOBAL or value.ndim != len(shape) or not shape.numel():
        return None
    single = [1 if dim in GLOBAL[leaf] else size for dim, size in enumerate(shape)]
    return value.expand(shape) if list(value.shape) == single else None


def _table_size(owner: nn.Module, area: int) -> tuple[int, int] | None:
    """Rows and columns of the owner's bias table, by default those of a square."""
    side = _square_side(area)
    return getattr(owner, "table_size", (side, side) if side else None)


def _square_side(area: int) -> int:
    """Side of a square with this area, 0 if there is none."""
    side = math.isqrt(max(area, 0))
    return side if side * side == area else 0
