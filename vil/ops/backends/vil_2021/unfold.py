"""Attention of each token to its (2w+1)**2 neighbors: copy all neighbors, then use plain matmuls.

This simple implementation for comparisons stores (2w+1)**2 copies of k and of v. It can be
differentiated twice.

Shapes: B batch, N heads, D head dim, X Y grid, L = X*Y tokens, G global tokens, w window size, K =
(2w+1)**2 neighbors of a token, or fewer if the window is larger than the grid.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import attend_jointly
from vil.ops.call import Call
from vil.ops.window import Mask, Window


def unfold_nnf(x: Tensor, reach: tuple[int, int]) -> Tensor:
    """Gather each token's K neighbors, with 0 outside the grid.

    x (batch, heads, rows, columns, channels). Returns (batch, heads, tokens, channels, K). reach:
    rows and columns of neighbors on each side of a token.
    """
    sides = tuple(2 * n + 1 for n in reach)
    maps = x.permute(0, 1, 4, 2, 3).flatten(0, 1)  # (B*N, D, X, Y)
    copies = F.unfold(maps, sides, padding=reach)  # (B*N, D*K, L)
    return copies.mT.unflatten(2, (x.shape[4], -1)).unflatten(0, x.shape[:2])


def unfold_tensor(x: Tensor, reach: tuple[int, int]) -> Tensor:
    """Gather each token's K neighbors like `unfold_nnf`, but with Tensor.unfold.

    x (batch, heads, rows, columns, channels). Returns (batch, heads, tokens, channels, K). reach:
    rows and columns of neighbors on each side of a token.
    """
    rows, cols = reach
    padded = F.pad(x, (0, 0, cols, cols, rows, rows))
    views = padded.unfold(2, 2 * rows + 1, 1).unfold(3, 2 * cols + 1, 1)
    return views.flatten(5, 6).flatten(2, 3)  # (B, N, X, Y, D, 2w+1, 2w+1) before


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    exact = case.window.mask == Mask.EXACT
    return [] if exact else ["it computes only the exact window (SW_EXACT 1)"]


def run_nnf(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` with `unfold_nnf`."""
    return _run(call, unfold_nnf)


def run_tensor(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` with `unfold_tensor`."""
    return _run(call, unfold_tensor)


def _run(call: Call, unfold: Callable[[Tensor, tuple[int, int]], Tensor]) -> Tensor:
    window: Window = call.window  # pyrefly: ignore[bad-assignment]  # the registry refuses layouts
    lengths = [call.num_global, window.length]
    rows, cols = (min(window.size, n - 1) for n in window.grid)  # the grid has no farther neighbor
    reach = (rows, cols)
    q = call.q * call.scale
    k_global, k_local = call.k.split(lengths, dim=2)
    v_global, v_local = call.v.split(lengths, dim=2)
    first = call._replace(q=q, k=k_global, v=v_global)
    keys = unfold(k_local.unflatten(2, window.grid), reach)
    logits = (q[:, :, :, None] @ keys).squeeze(3)  # (B, N, L, K)
    if call.bias.table is not None:
        logits = logits + _neighbor_bias(call.bias.table, window, reach)[:, None]
    visible = _visible(window, reach, call.valid_hw, q.device)[:, None]

    def weigh(weights: Tensor) -> Tensor:
        values = unfold(v_local.unflatten(2, window.grid), reach)
        return (weights[..., None, :] @ values.mT).squeeze(3)

    return attend_jointly(first, logits, visible, weigh)


def _steps(reach: int, device: torch.device) -> Tensor:
    """Return the displacements of neighbors along an axis: the integers from -reach to reach.

    A displacement is the key position minus the query position.
    """
    return torch.arange(-reach, reach + 1, device=device)


def _neighbor_bias(table: Tensor, window: Window, reach: tuple[int, int]) -> Tensor:
    """Return the bias of a query's K neighbors in each of N heads, (N, K)."""
    # the table is indexed by query position minus key position
    row, col = (2 * window.size - 1 - _steps(n, table.device) for n in reach)
    index = row[:, None] * (4 * window.size - 1) + col
    return table.index_select(1, index.flatten())


def _visible(
    window: Window, reach: tuple[int, int], valid_hw: Tensor | None, device: torch.device
) -> Tensor:
    """Return whether each neighbor of a token is inside the grid and not padding.

    The result is (B or 1, L, K) bool for K neighbors of each of L tokens. reach: rows and columns
    of neighbors on each side of a token.
    """
    real = torch.tensor([window.grid], device=device)
    if valid_hw is not None:
        real = real.minimum(valid_hw.to(device))  # (B, 2)
    lines = []  # of rows (B or 1, X, 2w+1), of columns (B or 1, Y, 2w+1)
    for axis, size in enumerate(window.grid):
        token = torch.arange(size, device=device)[:, None] + _steps(reach[axis], device)
        lines.append((token >= 0) & (token < real[:, axis, None, None]))
    rows, cols = lines
    return (rows[:, :, None, :, None] & cols[:, None, :, None, :]).flatten(3).flatten(1, 2)
