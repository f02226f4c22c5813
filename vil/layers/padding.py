"""Masks for batches of images that are padded to one size.

Shapes: B batch, C channels, X Y rows and columns. `valid_hw` (B, 2) int64 counts the rows and
columns of each image that are not padding, from the top left.
"""

import torch
from torch import Tensor

Grid = tuple[int, int]  # rows and columns


def downsample_valid(valid_hw: Tensor, factor: int) -> Tensor:
    """`valid_hw` of a map that is smaller by `factor`, rounded up."""
    return -(-valid_hw // factor)


def real_cells(valid_hw: Tensor, size: Grid) -> Tensor:
    """(B, 1, X, Y) bool: the cells of a map of that size that are not padding."""
    rows, cols = (torch.arange(n, device=valid_hw.device) for n in size)
    inside = (rows < valid_hw[:, :1])[:, :, None] & (cols < valid_hw[:, 1:])[:, None]
    return inside[:, None]


def zero_padding(x: Tensor, valid_hw: Tensor | None) -> Tensor:
    """x (B, C, X, Y) with zeros in the padding; x itself if `valid_hw` is None."""
    return x if valid_hw is None else x.masked_fill(~real_cells(valid_hw, x.shape[-2:]), 0.0)
