"""Bias tables in the form that kernels read.

They are in float32, multiplied by log2(e) for an exponential in base 2, and include the mask of the
exact window.

Shapes: N heads, w chunk side. A table (N, rows*columns) has an entry for each displacement, query
position minus key position, with (0, 0) in the middle.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from vil.ops.backends.triton.layouts import make_table_index
from vil.ops.layout import Layout
from vil.ops.patterns.base import Reach
from vil.ops.window import Mask, Window

LOG2E = math.log2(math.e)


def base_2(bias: Tensor | None) -> Tensor | None:
    """Return a bias as float32, multiplied by log2(e); None if it is None or empty."""
    return None if bias is None or not bias.numel() else (bias.float() * LOG2E).contiguous()


def make_table(window: Window | Layout, table: Tensor | None) -> tuple[Tensor | None, Reach]:
    """Return the bias table for kernels, and its largest displacement (rows, columns).

    table: the table of a `LocalBias`. If it is None, the returned table is always None. Otherwise,
    the returned table of an exact window is -inf for keys that are too far away, and that of a
    `Layout` has an entry for each displacement in the attended chunk pairs.
    """
    if isinstance(window, Layout):
        if table is None:
            return None, (0, 0)
        index, reach = make_table_index(window, table.device)
        return base_2(table.index_select(1, index)), reach
    reach = (2 * window.size - 1, 2 * window.size - 1)
    scaled = base_2(table)
    if scaled is not None and window.mask == Mask.EXACT:
        scaled += exact_mask(window.size, scaled.device)
    return scaled, reach


# cached, because a copy to the device synchronizes, and a CUDA graph cannot capture it
@lru_cache(maxsize=64)
def exact_mask(size: int, device: torch.device) -> Tensor:
    """Return the mask of the exact window as a bias table, flattened to ((4*size - 1)**2,).

    It is -inf for displacements of more than `size` rows or columns, else 0.
    """
    far = torch.arange(1 - 2 * size, 2 * size).abs() > size
    hidden = torch.zeros(len(far), len(far)).masked_fill(far[:, None] | far, -math.inf)
    return hidden.flatten().to(device)
