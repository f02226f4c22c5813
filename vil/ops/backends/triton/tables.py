"""Bias tables in the form that kernels read: float32, in base 2, including the exact mask.

Shapes: N heads, w chunk side. A table (N, rows*columns) has an entry for each displacement from key
to query, with (0, 0) in the middle.
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

    table: the table of a `LocalBias`; if it is None, None is returned in its place. In the exact
    window, the returned table is -inf for keys that are too far away. In a layout, it is expanded
    to all displacements in the layout's pairs of chunks.
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


@lru_cache(maxsize=64)
def exact_mask(size: int, device: torch.device) -> Tensor:
    """Return the exact mask as a bias table: -inf beyond `size` rows or columns, else 0.

    The table is flattened, ((4*size - 1)**2,). It is cached, because copying to the device
    synchronizes and cannot be in a CUDA graph.
    """
    far = torch.arange(1 - 2 * size, 2 * size).abs() > size
    hidden = torch.zeros(len(far), len(far)).masked_fill(far[:, None] | far, -math.inf)
    return hidden.flatten().to(device)
