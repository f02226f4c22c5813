"""The exact window by unfolding: every token's neighbours copied beside it, then plain products.

The simplest implementation after the definition, to compare with: it keeps (2w+1)**2 copies of k
and of v. `unfold_nnf` copies by torch.nn.functional.unfold, `unfold_tensor` by Tensor.unfold; the
rest is the same. Plain autograd, so second derivatives too.

Letters: B images, N heads, D channels of a head, X Y grid, L = X*Y tokens, G global tokens, w
window, K = (2w+1)**2 neighbours of a token, fewer where the window is larger than the grid.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import can_be_empty, masked_softmax
from vil.ops.bias import LocalBias
from vil.ops.window import Window


def neighbours_nnf(x: Tensor, reach: tuple[int, int]) -> Tensor:
    """x (B, N, X, Y, D) -> (B, N, L, D, K): all tokens at most `reach` rows and columns away.

    Neighbours come row-major; beyond the grid they are 0.
    """
    sides = tuple(2 * n + 1 for n in reach)
    maps = x.permute(0, 1, 4, 2, 3).flatten(0, 1)  # (B*N, D, X, Y)
    copies = F.unfold(maps, sides, padding=reach)  # (B*N, D*K, L)
    return copies.mT.unflatten(2, (x.shape[4], -1)).unflatten(0, x.shape[:2])


def neighbours_tensor(x: Tensor, reach: tuple[int, int]) -> Tensor:
    """The same from two views of the padded grid; flattening them makes the copies."""
    rows, cols = reach
    padded = F.pad(x, (0, 0, cols, cols, rows, rows))
    views = padded.unfold(2, 2 * rows + 1, 1).unfold(3, 2 * cols + 1, 1)
    return views.flatten(5, 6).flatten(2, 3)  # (B, N, X, Y, D, 2w+1, 2w+1) before


def unsupported(case: Case) -> list[str]:
    """The reasons why it cannot compute a case."""
    exact = case.window.exact == 1  # which has all nine offsets
    return [] if exact else ["the window is cut into chunks: unfolding sees the exact one only"]


def attend_nnf(q: Tensor, k: Tensor, v: Tensor, window: Window, **options) -> Tensor:
    """See `vil.ops.local_attention`."""
    return _attend(q, k, v, window, neighbours_nnf, **options)


def attend_tensor(q: Tensor, k: Tensor, v: Tensor, window: Window, **options) -> Tensor:
    """See `vil.ops.local_attention`."""
    return _attend(q, k, v, window, neighbours_tensor, **options)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    neighbours: Callable[[Tensor, tuple[int, int]], Tensor],
    *,
    num_global: int,
    bias: LocalBias,
    valid: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    reach = tuple(min(window.size, n - 1) for n in window.grid)  # no neighbour is farther away
    q = q * scale
    k_global, k_local = k.split([num_global, window.length], dim=2)
    v_global, v_local = v.split([num_global, window.length], dim=2)
    keys = neighbours(k_local.unflatten(2, window.grid), reach)
    logits = (q[:, :, :, None] @ keys).squeeze(3)  # (B, N, L, K)
    if bias.table is not None:
        logits = logits + _bias_of(bias.table, window, reach)[:, None]
    visible = _visible(window, reach, valid, q.device)[:, None]
    if num_global:
        to_global = q @ k_global.mT  # (B, N, L, G)
        if bias.to_global is not None:
            to_global = to_global + bias.to_global[:, None]
        logits = torch.cat([to_global, logits], dim=-1)
        visible = F.pad(visible, (num_global, 0), value=True)
    weights = masked_softmax(logits, visible, can_be_empty(num_global, valid))
    weights = F.dropout(weights, dropout_p).to(v.dtype)
    values = neighbours(v_local.unflatten(2, window.grid), reach)
    out = (weights[..., None, num_global:] @ values.mT).squeeze(3)
    return out + weights[..., :num_global] @ v_global if num_global else out


def _steps(reach: int, device: torch.device) -> Tensor:
    """Key position minus query position, of each neighbour along an axis."""
    return torch.arange(-reach, reach + 1, device=device)


def _bias_of(table: Tensor, window: Window, reach: tuple[int, int]) -> Tensor:
    """(N, K): the bias of each neighbour; the table goes by query position minus key position."""
    row, col = (2 * window.size - 1 - _steps(n, table.device) for n in reach)
    index = row[:, None] * (4 * window.size - 1) + col
    return table.index_select(1, index.flatten())


def _visible(
    window: Window, reach: tuple[int, int], valid: Tensor | None, device: torch.device
) -> Tensor:
    """bool (B or 1, L, K): the neighbours that lie within the grid and within `valid`."""
    real = torch.tensor([window.grid], device=device)
    if valid is not None:
        real = real.minimum(valid.to(device))  # (B, 2)
    lines = []  # of rows (B or 1, X, 2w+1), of columns (B or 1, Y, 2w+1)
    for axis, size in enumerate(window.grid):
        token = torch.arange(size, device=device)[:, None] + _steps(reach[axis], device)
        lines.append((token >= 0) & (token < real[:, axis, None, None]))
    rows, cols = lines
    return (rows[:, :, None, :, None] & cols[:, None, :, None, :]).flatten(3).flatten(1, 2)
