"""The chunk layout: a grid of tokens that is divided into chunks of w x w tokens.

Incomplete chunks, at the bottom and right of the grid, are zero-padded.

Shapes: B batch, N heads, L tokens of a grid of X x Y, R x C chunks of W = w*w tokens, D channels.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.call import Call
from vil.ops.window import SELF_CHUNK, ChunkGrid, Window

Offsets = tuple[tuple[int, int], ...]
Values = Callable[[Tensor], Tensor]


def to_tiles(x: Tensor, window: ChunkGrid, sides: tuple[int, int] | None = None) -> Tensor:
    """View tokens (B, N, L, D) as R x C chunks of w x w tokens, (B, N, R, C, w, w, D).

    If w does not divide both sides of the grid, returns a zero-padded copy instead.
    sides: rows and columns of a chunk, if it is smaller than w x w because the grid is.
    """
    rows, cols = window.chunks
    down, across = sides or (window.size, window.size)
    missing = rows * down - window.grid[0], cols * across - window.grid[1]
    x = x.unflatten(2, window.grid)
    if any(missing):  # F.pad copies even without padding
        x = F.pad(x, (0, 0, 0, missing[1], 0, missing[0]))
    return x.unflatten(3, (cols, across)).unflatten(2, (rows, down)).transpose(3, 4)


def from_tiles(x: Tensor, window: ChunkGrid) -> Tensor:
    """Reverse `to_tiles`: reorder (B, N, R, C, w, w, D) to (B, N, L, D), without the padding."""
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return x[:, :, : window.grid[0], : window.grid[1]].flatten(2, 3)


def to_chunks(x: Tensor, window: ChunkGrid) -> Tensor:
    """Reorder row-major tokens (B, N, L, D) to R x C chunks of W tokens, (B, N, R, C, W, D)."""
    if window.symbolic:
        return at_offsets(x, Window(window.grid, window.size, offsets=(SELF_CHUNK,)))
    return to_tiles(x, window).flatten(4, 5)


def from_chunks(x: Tensor, window: ChunkGrid) -> Tensor:
    """Reverse `to_chunks`: reorder (B, N, R, C, W, D) to (B, N, L, D), without the padding."""
    if window.symbolic:
        return x.flatten(2, 4).index_select(2, _chunk_index(window, x.device))
    return from_tiles(x.unflatten(4, (window.size, window.size)), window)


def at_offsets(x: Tensor, window: Window) -> Tensor:
    """Gather, for each of R x C chunks, the tokens of the K chunks at `window.offsets` from it.

    x (B, N, L, D). Returns (B, N, R, C, K*W, D), in which positions outside the grid have arbitrary
    tokens. Unlike `to_tiles`, this function does not pad the grid. Padding would fix the grid size
    in an exported graph.
    """
    index = window.neighbor_tokens(x.device)
    return x.index_select(2, index.flatten()).unflatten(2, index.shape)


def _chunk_index(window: ChunkGrid, device: torch.device) -> Tensor:
    """Return, for each token of the grid, its index among the R*C*W tokens of all chunks, (L,)."""
    w, (row, col) = window.size, (torch.arange(n, device=device) for n in window.grid)
    row, col = row[:, None], col[None, :]
    return ((row // w * window.chunks[1] + col // w) * w * w + row % w * w + col % w).flatten()


def roll_neighbors(x: Tensor, offsets: Offsets) -> Iterator[Tensor]:
    """For each offset, yield a copy of x that has, at each chunk, the neighbor at that offset.

    x (B, N, R, C, ...): R x C chunks. Neighbors wrap around at the border.
    """
    rows, shifted = 0, x  # consecutive offsets in the same row share one roll of the rows
    for dx, dy in offsets:
        if dx != rows:
            rows, shifted = dx, torch.roll(x, -dx, dims=2) if dx else x
        yield torch.roll(shifted, -dy, dims=3) if dy else shifted


def sum_neighbors(parts: Iterable[Tensor], offsets: Offsets) -> Tensor:
    """Apply the transpose of `roll_neighbors`, for gradients: roll the tensors back, and sum them.

    parts: one tensor (B, N, R, C, ...) for each of the offsets.
    """
    rows: dict[int, Tensor] = {}
    for part, (dx, dy) in zip(parts, offsets):
        part = torch.roll(part, dy, dims=3) if dy else part
        rows[dx] = rows[dx] + part if dx in rows else part
    # pyrefly: ignore[bad-return]  # not the 0 of an empty sum
    return sum(torch.roll(x, dx, dims=2) if dx else x for dx, x in rows.items())


def masked_softmax(scores: Tensor, visible: Tensor, may_be_empty: bool) -> Tensor:
    """Compute a softmax over the visible scores of the last dimension, in float32 or float64.

    visible: bool tensor, False for scores to mask. may_be_empty: whether there may be queries
    without visible scores. The weights of such a query are then 0.
    """
    scores = scores if scores.dtype == torch.float64 else scores.float()
    # -inf would give NaN gradients for a query without visible scores
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~visible, 0.0) if may_be_empty else weights


def attend_jointly(first: Call, scores: Tensor, visible: Tensor, values: Values) -> Tensor:
    """Attend to global and local keys with a single softmax. Returns the output (B, N, .., D).

    first: the call for the global keys. Its k and v have only the global tokens. Its q
    (B, N, .., D) is already scaled.
    scores (B, N, .., K): scores of the queries with their K local keys.
    visible (B, N or 1, .., K): False for local keys to mask.
    values: function that multiplies softmax weights (B, N, .., K) with the local values.
    """
    num_global, unit = first.num_global, (1,) * (first.q.ndim - 4)
    if num_global:
        to_global = first.q @ first.k.unflatten(1, (-1, *unit)).mT  # (B, N, .., G)
        if first.bias.to_global is not None:
            to_global = to_global + first.bias.to_global.unflatten(0, (-1, 1, *unit))
        scores = torch.cat([to_global, scores], dim=-1)
        visible = F.pad(visible, (num_global, 0), value=True)
    weights = masked_softmax(scores, visible, can_be_empty(num_global, first.valid_hw))
    weights = F.dropout(weights, first.dropout_p).to(first.v.dtype)
    out = values(weights[..., num_global:])
    if not num_global:
        return out
    return out + weights[..., :num_global] @ first.v.unflatten(1, (-1, *unit))


def can_be_empty(num_global: int, valid_hw: Tensor | None) -> bool:
    """Return whether a query may have no keys.

    This is possible only with padding and without global tokens.
    """
    return valid_hw is not None and num_global == 0
