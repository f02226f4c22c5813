"""Logits of an image of any size: of the whole image, or of overlapping windows.

Shapes: c channels, K classes, H W size of an image.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vil.data.tiles import make_tiles


def blend_windows(
    compute: Callable[[Tensor], Tensor], image: Tensor, *, tile: int, overlap: int
) -> Tensor:
    """Compute the logits (K, H, W) of an image (c, H, W) in overlapping windows.

    The logits of a pixel are the weighted mean of those of all windows that contain it. The weight
    falls linearly to the border of a window within the overlap, except at the border of the image.
    So the result has no seams.

    compute: maps a window (c, h, w) to its logits (K, h, w). tile, overlap: side of a window, and
    overlap of neighboring windows, in pixels.
    """
    size = image.shape[-2:]
    total = weights = None
    for left, top, right, bottom in make_tiles(size, tile, overlap).tolist():
        logits = compute(image[:, top:bottom, left:right]).float()
        if total is None:
            total = logits.new_zeros(len(logits), *size)
            weights = logits.new_zeros(size)
        rows = _ramp(top, bottom, size[0], overlap)
        weight = rows[:, None] * _ramp(left, right, size[1], overlap)
        weight = weight.to(logits)
        total[:, top:bottom, left:right] += logits * weight
        weights[top:bottom, left:right] += weight
    return total.div_(weights)


def _ramp(first: int, last: int, size: int, overlap: int) -> Tensor:
    """Return the weights (last - first,) of the rows or columns first..last - 1 of `size`.

    They rise from 0 to 1 within `overlap` pixels of each end that is not an end of the image.
    """
    place = torch.arange(first, last) + 0.5
    rise = (place - first) / overlap if first and overlap else torch.ones(last - first)
    fall = (last - place) / overlap if last < size and overlap else torch.ones(last - first)
    return torch.minimum(rise, fall).clamp(max=1)
