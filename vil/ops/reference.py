"""The reference implementation of local attention. Every backend is tested against it.

It is slow and simple: it processes one query at a time, with one softmax over the global keys and
the query's local keys. A token that occurs several times in a cyclic window counts as several keys
with different biases. This file shares no code with the masks of window.py and layout.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.layout import Layout
from vil.ops.patterns.base import Pairs
from vil.ops.window import Mask, Window


def attended_keys(window: Window, x: int, y: int) -> list[tuple[int, int, int]]:
    """Return the keys of the query at row x and column y: a list of (row, column, bias index).

    The bias index is an index into the flattened bias table.
    """
    w, (rows, cols), keys = window.size, window.chunks, []
    for dx, dy in window.offsets:
        for i in range(w):
            for j in range(w):
                row, col = (x // w + dx) * w + i, (y // w + dy) * w + j  # before wrapping
                if window.mask == Mask.EXACT and (abs(row - x) > w or abs(col - y) > w):
                    continue
                index = (x - row + 2 * w - 1) * (4 * w - 1) + (y - col + 2 * w - 1)
                if window.cyclic:
                    row, col = row % (rows * w), col % (cols * w)
                if 0 <= row < window.grid[0] and 0 <= col < window.grid[1]:
                    keys.append((row, col, index))
    return keys


def keys_of_pattern(layout: Layout, x: int, y: int) -> tuple[Tensor, Tensor]:
    """Return (index, visible) for the query at row x and column y, and each of the L tokens as key.

    index (L,) int64: the index of each key's bias in the flattened bias table. visible (H, L) bool:
    whether the query attends to each key. H is 1 if all heads have the same pattern.
    """
    row, col = (torch.arange(n) for n in layout.grid)
    row, col = row.repeat_interleave(layout.grid[1]), col.repeat(layout.grid[0])
    pairs = Pairs(layout.grid, torch.full_like(row, x), torch.full_like(col, y), row, col)
    top, left = layout.table_reach
    down = (x - row).clamp(-top, top) + top
    index = down * (2 * left + 1) + (y - col).clamp(-left, left) + left
    visible = layout.pattern.visible(pairs)
    return index, visible.expand(layout.heads, layout.length)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window | Layout,
    *,
    num_global: int = 0,
    bias: LocalBias = NO_BIAS,
    valid_hw: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute `vil.ops.local_attention` one query at a time.

    The arguments and the result are the same as in `local_attention`. Scores and sums are in
    float32 (float64 for float64 inputs).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys, values = q.to(dtype), k.to(dtype), v.to(dtype)
    if valid_hw is not None:  # a weight of 0 would not hide NaN in the padding
        rows, cols = (torch.arange(n, device=q.device) for n in window.grid)
        real = ((rows[:, None] < valid_hw[:, :1, None]) & (cols < valid_hw[:, 1:, None])).flatten(1)
        real = torch.cat([real.new_ones(len(q), num_global), real], 1)[:, None, :, None]
        keys, values = torch.where(real, keys, 0), torch.where(real, values, 0)
    out = []
    for number in range(window.length):
        x, y = divmod(number, window.grid[1])
        if isinstance(window, Layout):
            index, visible = (part.to(q.device) for part in keys_of_pattern(window, x, y))
            row, col = (
                torch.arange(window.length, device=q.device) // window.grid[1],
                torch.arange(window.length, device=q.device) % window.grid[1],
            )
        else:
            local = torch.tensor(attended_keys(window, x, y), device=q.device).reshape(-1, 3)
            (row, col, index), visible = (
                local.unbind(1),
                torch.ones(1, len(local), dtype=torch.bool, device=q.device),
            )
        attended = torch.cat(
            [torch.arange(num_global, device=q.device), num_global + row * window.grid[1] + col]
        )
        # (B, N, attended keys)
        score = scale * (queries[:, :, number, None] * keys[:, :, attended]).sum(-1)
        if bias.to_global is not None:
            zeros = bias.to_global.new_zeros(len(bias.to_global), len(row))
            score = score + torch.cat([bias.to_global, zeros], 1)
        if bias.table is not None:
            added = bias.table[:, index]
            score = score + torch.cat([added.new_zeros(len(added), num_global), added], 1)
        if valid_hw is not None:
            visible = visible & ((row < valid_hw[:, :1]) & (col < valid_hw[:, 1:]))[:, None]
        weight = _softmax(score, F.pad(visible, (num_global, 0), value=True))
        weight = F.dropout(weight, dropout_p)
        out.append((weight[..., None] * values[:, :, attended]).sum(-2))
    return torch.stack(out, dim=2).to(q.dtype)


def _softmax(score: Tensor, visible: Tensor) -> Tensor:
    """Compute a masked softmax over the last dimension. It is 0 where `visible` is False."""
    score = score.masked_fill(~visible, -torch.inf)
    top = score.amax(-1, keepdim=True).detach() if score.shape[-1] else score.sum(-1, keepdim=True)
    power = torch.exp(score - torch.where(top.isfinite(), top, 0.0))
    total = power.sum(-1, keepdim=True)
    return power / torch.where(total > 0, total, 1.0)
