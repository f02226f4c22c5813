"""Maps of images that were padded to one size: which cells are real, and the rest blank.

Letters: B images, C channels, X Y rows and columns. `valid` (B, 2) int64 counts an image's real
rows and columns; they begin at the top left.
"""

import torch
from torch import Tensor


def downsample_valid(valid: Tensor, factor: int) -> Tensor:
    """The real cells of a map `factor` times as coarse: those with any real cell inside."""
    return -(-valid // factor)


def real_cells(valid: Tensor, size: tuple[int, int]) -> Tensor:
    """valid (B, 2) -> (B, 1, X, Y) bool: the cells of a map of that size that are real."""
    rows, cols = (torch.arange(n, device=valid.device) for n in size)
    inside = (rows < valid[:, :1])[:, :, None] & (cols < valid[:, 1:])[:, None]
    return inside[:, None]


def zero_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """x (B, C, X, Y) with 0 in the padding; as it is where nothing is padded (None)."""
    return x if valid is None else x.masked_fill(~real_cells(valid, x.shape[-2:]), 0.0)
