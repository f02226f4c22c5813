"""Masks for batches of images that are padded to a common size.

Shapes: B batch, C channels, X Y rows and columns. `valid_hw` (B, 2) int64 holds the rows and
columns of each image that are not padding. Padding is at the bottom and right.
"""

import torch
from torch import Tensor

from vil.ops.window import real_cells

Grid = tuple[int, int]  # rows and columns
Valid = Tensor | None  # `valid_hw`; None if no image is padded


def downsample_valid(valid_hw: Tensor, factor: int, limit: Grid | None = None) -> Tensor:
    """Return the number of unpadded rows and columns of each image after downsampling, rounded up.

    valid_hw (B, 2): the numbers before downsampling. factor: the downsampling factor. limit: the
    largest numbers of rows and columns.
    """
    valid_hw = -(-valid_hw // factor)
    if limit is None:
        return valid_hw
    # by two numbers, because a GPU would wait for a copy of a tensor
    return torch.stack([n.clamp(max=most) for n, most in zip(valid_hw.unbind(-1), limit)], dim=-1)


def zero_padding(x: Tensor, valid_hw: Valid) -> Tensor:
    """Return x (B, C, X, Y) with padding set to zero; x itself if `valid_hw` is None.

    valid_hw (B, 2): rows and columns of each image that are not padding.
    """
    return x if valid_hw is None else x.masked_fill(~real_cells(valid_hw, x.shape[-2:]), 0.0)
