"""Overlapping tiles of large images."""

import torch
from torch import Tensor


def make_tiles(size: tuple[int, int], tile: int, overlap: int) -> Tensor:
    """Return T tiles that cover an image of `size` (H, W), row by row: (T, 4) int64, x1 y1 x2 y2.

    tile, overlap: side of a tile, and overlap of neighboring tiles, in pixels. The last tile of a
    row or column ends at the image's border, so its overlap may be larger. A tile is never larger
    than the image. Raises ValueError unless 0 <= overlap < tile.
    """
    if tile < 1 or not 0 <= overlap < tile:
        raise ValueError(
            "`tile` must be at least 1 pixel, and `overlap` at least 0 and less than `tile`: got "
            f"tile {tile} and overlap {overlap}"
        )
    last = [max(side - tile, 0) for side in size]
    tops, lefts = ([*range(0, end, tile - overlap), end] for end in last)
    height, width = (min(tile, side) for side in size)
    return torch.tensor([(x, y, x + width, y + height) for y in tops for x in lefts])
