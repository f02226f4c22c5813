"""Full attention with a dense mask for the window or the layout, for small grids.

This backend stores all L x L scores.

Shapes: B batch, N heads, H patterns (N, or 1 if all heads have the same), L tokens, D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import masked_softmax
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.patterns.base import Pairs
from vil.ops.window import Mask, Window, real_cells

MAX_MASKED_LENGTH = 8192  # tokens; above it the scores of a head exceed 256 MiB


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    reasons = []
    if case.window.repeats():
        reasons.append(
            "keys repeat: the cyclic window spans more rows or columns of chunks than the grid"
        )
    if not case.window.symbolic and case.window.length > MAX_MASKED_LENGTH:
        reasons.append(
            f"{case.window.length} tokens are more than {MAX_MASKED_LENGTH}: it stores all scores"
        )
    return reasons


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a validated `Call`. Returns (B, N, L, D)."""
    q, k, v, window, num_global, bias, valid_hw, scale, dropout_p, *_ = call
    visible, index = dense_window(window, q.device)
    if valid_hw is not None:
        real = real_cells(valid_hw.to(q.device), window.grid).flatten(2)
        visible = visible & real[:, :, None]  # (B, H, L, L)
    scores = (q * scale) @ k.mT
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if bias.table is not None:
        local = bias.table.index_select(1, index.flatten()).unflatten(1, index.shape)
        scores = scores + F.pad(local, (num_global, 0))
    if bias.to_global is not None:
        scores = scores + F.pad(bias.to_global, (0, window.length))[:, None]
    visible = F.pad(visible, (num_global, 0), value=True)
    may_be_empty = num_global == 0 and (valid_hw is not None or isinstance(window, Layout))
    weights = masked_softmax(scores, visible, may_be_empty)
    return F.dropout(weights, dropout_p).to(v.dtype) @ v


def dense_window(window: Window | Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (visible, index) for all pairs of L queries and L keys.

    visible (H, L, L) bool: whether the query attends to the key in each pattern.
    index (L, L) int64: the index of the pair's bias in the flattened bias table.
    """
    if isinstance(window, Layout):
        pairs = Pairs.every(window.grid)
        mask = window.pattern.mask(window.grid)[None] if window.symbolic else window.mask
        return mask.to(device), window.bias_index(pairs.rows, pairs.cols).to(device)
    side = 4 * window.size - 1
    visible = torch.zeros(*window.grid, *window.grid, dtype=torch.bool, device=device)
    index = torch.zeros(*window.grid, *window.grid, dtype=torch.long, device=device)
    for dx, dy in window.offsets:
        row_visible, row_index = _along(window, 0, dx, device)
        col_visible, col_index = _along(window, 1, dy, device)
        added = row_visible[:, None, :, None] & col_visible[None, :, None, :]
        visible |= added
        entry = row_index[:, None, :, None] * side + col_index[None, :, None, :]
        index = torch.where(added, entry, index)
    return visible.flatten(2).flatten(0, 1)[None], index.flatten(2).flatten(0, 1)


def _along(window: Window, axis: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (visible, index) for all pairs of a query and a key position along one axis.

    The n positions are the rows of the grid (axis 0) or its columns (axis 1).
    visible (n, n) bool: whether the key's chunk is `step` chunks after the query's chunk. In an
    exact window, the distance must also be at most `window.size`.
    index (n, n) int64: row (axis 0) or column (axis 1) of the pair's bias in the bias table.
    """
    w, count = window.size, window.chunks[axis]
    token = torch.arange(window.grid[axis], device=device)
    query, key = token[:, None], token[None, :]
    target = query // w + step
    visible = key // w == (target % count if window.cyclic else target)
    distance = query % w - (key % w + step * w)  # query minus key, unwrapped
    if window.mask == Mask.EXACT:
        visible = visible & (distance.abs() <= w)
    return visible, distance + 2 * w - 1
