"""Replace a window larger than the grid by an equivalent, faster window of the grid's size.

If w >= max(X, Y), every query attends to all tokens. In a cyclic window, each token then occurs
several times in the softmax. This is equivalent to one occurrence whose bias is the log-sum-exp of
the biases of all occurrences.

Shapes: N heads, X Y grid, w window size, s = max(X, Y), the size of the new window.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.window import SELF_CHUNK, Mask, Window


def shrink_window(window: Window | Layout, *, dropout: bool = False) -> Window | Layout:
    """Return an equivalent window whose size is the longer side of the grid.

    Returns `window` unchanged if it is smaller than that side, if its grid is symbolic, or if it is
    a layout. With dropout, a cyclic window in which a key occurs several times is unchanged too.
    """
    size = 0 if window.symbolic or isinstance(window, Layout) else max(window.grid)
    if not size or window.size < size or (window.size == size and not window.cyclic):
        return window
    if window.mask == Mask.EXACT:
        return Window(window.grid, size, Mask.EXACT)
    # dropout is applied to each occurrence of a key separately
    if window.cyclic and len(window.offsets) > 1 and dropout:
        return window
    return Window(window.grid, size, Mask.CHUNKS, (SELF_CHUNK,))


def shrink_call(call: Call) -> Call:
    """Return an equivalent call whose window is at most as large as the grid.

    The window is from `shrink_window`, and the bias table is changed to match it.
    """
    window = call.window
    small = shrink_window(window, dropout=call.dropout_p > 0)
    if small == window or call.neighbor is not None:
        return call
    table = call.bias.table
    if window.cyclic and len(window.offsets) > 1:
        table = _sum_occurrences(table, window, small.size, call.q)
    elif table is not None:
        first = 2 * (window.size - small.size)  # of the central part of the table
        side = slice(first, first + 4 * small.size - 1)
        table = _square(table, window.size)[:, side, side].flatten(1)
    return call._replace(window=small, bias=call.bias._replace(table=table))


def shrink_case(case: Case) -> Case:
    """Return the `Case` of an attention call after `shrink_call`. case: the `Case` before it."""
    small = shrink_window(case.window, dropout=case.dropout)
    if small == case.window:
        return case
    has_table = case.table_bias or (case.window.cyclic and len(case.window.offsets) > 1)
    return replace(case, window=small, table_bias=has_table)


def _square(table: Tensor, size: int) -> Tensor:
    """View a bias table (N, (4w-1)**2) as (N, 4w-1, 4w-1), for N heads and window size w."""
    return table.unflatten(1, (4 * size - 1,) * 2)


def _sum_occurrences(table: Tensor | None, window: Window, size: int, q: Tensor) -> Tensor:
    """Return the bias table (N, (4s-1)**2) of the new window, in which each key occurs once.

    In the cyclic `window`, a key occurs at each of several offsets. Its new bias is the log-sum-exp
    of the biases of these occurrences.

    table: the biases of `window`; None if they are 0. size: s. q: the queries. If `table` is None,
    the result has their number of heads and their dtype.
    """
    if table is None:
        number = math.log(len(window.offsets))
        return q.new_full((q.shape[1], (4 * size - 1) ** 2), number)
    w, square = window.size, _square(table, window.size)
    parts = []
    for offset in window.offsets:
        firsts = [2 * w - size - step * w for step in offset]  # of distances from 1-s
        rows, cols = (slice(first, first + 2 * size - 1) for first in firsts)
        parts.append(square[:, rows, cols])
    wide = torch.promote_types(table.dtype, torch.float32)
    summed = torch.stack(parts).to(wide).logsumexp(0)
    return F.pad(summed, (size,) * 4).flatten(1).to(table.dtype)
