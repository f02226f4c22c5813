"""What local attention means: slow, obvious, and the truth that every backend is tested against.

One query at a time. A query meets every (offset, key) of its window; those that do not exist are
left out; one softmax runs over the global keys and the rest. A key that a small cyclic grid offers
twice is met twice, each time with the bias of that offset. Nothing here is shared with the masks of
window.py.
"""

import torch
from torch import Tensor

from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.window import Window


def meetings(window: Window, x: int, y: int) -> list[tuple[int, int, int]]:
    """(key row, key column, index into the bias table) of all a query at (x, y) may meet."""
    w, (rows, cols), found = window.size, window.chunks, []
    for dx, dy in window.offsets:
        for i in range(w):
            for j in range(w):
                row, col = (x // w + dx) * w + i, (y // w + dy) * w + j  # before wrapping
                if window.exact == 1 and (abs(row - x) > w or abs(col - y) > w):
                    continue
                index = (x - row + 2 * w - 1) * (4 * w - 1) + (y - col + 2 * w - 1)
                if window.cyclic:
                    row, col = row % (rows * w), col % (cols * w)
                if 0 <= row < window.grid[0] and 0 <= col < window.grid[1]:
                    found.append((row, col, index))
    return found


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    num_global: int = 0,
    bias: LocalBias = NO_BIAS,
    valid: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """q (B, N, L, D), k and v (B, N, G+L, D) -> (B, N, L, D); see `local_attention`."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys, values = q.to(work), k.to(work), v.to(work)
    out = []
    for number in range(window.length):
        x, y = divmod(number, window.grid[1])
        met = torch.tensor(meetings(window, x, y), device=q.device).reshape(-1, 3)
        seen = torch.cat(
            [
                torch.arange(num_global, device=q.device),
                num_global + met[:, 0] * window.grid[1] + met[:, 1],
            ]
        )
        score = scale * (queries[:, :, number, None] * keys[:, :, seen]).sum(-1)  # (B, N, keys met)
        if bias.to_global is not None:
            score = score + torch.cat(
                [bias.to_global, bias.to_global.new_zeros(len(bias.to_global), len(met))], 1
            )
        if bias.table is not None:
            local = bias.table[:, met[:, 2]]
            score = score + torch.cat([local.new_zeros(len(local), num_global), local], 1)
        exists = torch.ones(len(q), len(seen), dtype=torch.bool, device=q.device)  # per image
        if valid is not None:
            exists[:, num_global:] = (met[:, 0] < valid[:, :1]) & (met[:, 1] < valid[:, 1:])
        weight = _softmax(score, exists[:, None])
        weight = torch.nn.functional.dropout(weight, dropout_p)
        out.append((weight[..., None] * values[:, :, seen]).sum(-2))
    return torch.stack(out, dim=2).to(q.dtype)


def _softmax(score: Tensor, exists: Tensor) -> Tensor:
    """Softmax over the last dimension of what exists; all zeros where nothing does."""
    score = score.masked_fill(~exists, -torch.inf)
    top = score.amax(-1, keepdim=True).detach() if score.shape[-1] else score.sum(-1, keepdim=True)
    power = torch.exp(score - torch.where(top.isfinite(), top, 0.0))
    total = power.sum(-1, keepdim=True)
    return power / torch.where(total > 0, total, 1.0)
