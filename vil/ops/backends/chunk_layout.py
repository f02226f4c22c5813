"""The chunk layout: a grid of tokens divided into chunks of w x w, zero-padded at the bottom right.

Shapes: B batch, N heads, L tokens of a grid of X x Y, R x C chunks of W = w*w tokens, D channels.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.call import Call
from vil.ops.window import SELF_CHUNK, Window

Offsets = tuple[tuple[int, int], ...]
Values = Callable[[Tensor], Tensor]


def is_even(window: Window) -> bool:
    """Whether no chunk is cut by the border of the grid."""
    return all(side % window.size == 0 for side in window.grid)


def to_tiles(x: Tensor, window: Window) -> Tensor:
    """(B, N, L, D) -> (B, N, R, C, w, w, D): a view, of a zero-padded copy where chunks are cut."""
    (rows, cols), w = window.chunks, window.size
    x = x.unflatten(2, window.grid)
    if not is_even(window):  # F.pad copies even without padding
        x = F.pad(x, (0, 0, 0, cols * w - window.grid[1], 0, rows * w - window.grid[0]))
    return x.unflatten(3, (cols, w)).unflatten(2, (rows, w)).transpose(3, 4)


def from_tiles(x: Tensor, window: Window) -> Tensor:
    """Undo `to_tiles` and drop the padding."""
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return x[:, :, : window.grid[0], : window.grid[1]].flatten(2, 3)


def to_chunks(x: Tensor, window: Window) -> Tensor:
    """(B, N, L, D), row-major -> (B, N, R, C, W, D)."""
    if window.symbolic:
        return at_offsets(x, Window(window.grid, window.size, offsets=(SELF_CHUNK,)))
    return to_tiles(x, window).flatten(4, 5)


def from_chunks(x: Tensor, window: Window) -> Tensor:
    """(B, N, R, C, W, D) -> (B, N, L, D), without the padding."""
    if window.symbolic:
        return x.flatten(2, 4).index_select(2, _chunk_index(window, x.device))
    return from_tiles(x.unflatten(4, (window.size, window.size)), window)


def at_offsets(x: Tensor, window: Window) -> Tensor:
    """(B, N, L, D) -> (B, N, R, C, K*W, D): the tokens of the chunks at the window's K offsets.

    Positions outside the grid have any token. Export traces this instead of padding, rolling and
    cropping: it needs few operators, and those graphs would hold for one remainder of X / w only.
    """
    index = window.neighbor_tokens(x.device)
    return x.index_select(2, index.flatten()).unflatten(2, index.shape)


def _chunk_index(window: Window, device: torch.device) -> Tensor:
    """(L) int64: the index of each token in the chunk layout."""
    w, (row, col) = window.size, (torch.arange(n, device=device) for n in window.grid)
    row, col = row[:, None], col[None, :]
    return ((row // w * window.chunks[1] + col // w) * w * w + row % w * w + col % w).flatten()


def roll_neighbors(x: Tensor, offsets: Offsets) -> Iterator[Tensor]:
    """Roll x (B, N, R, C, ...) by each offset; consecutive offsets of one row share its roll."""
    rows, shifted = 0, x
    for dx, dy in offsets:
        if dx != rows:
            rows, shifted = dx, torch.roll(x, -dx, dims=2) if dx else x
        yield torch.roll(shifted, -dy, dims=3) if dy else shifted


def sum_neighbors(parts: Iterable[Tensor], offsets: Offsets) -> Tensor:
    """The transpose of `roll_neighbors`: roll the part of each offset back, and sum."""
    rows: dict[int, Tensor] = {}
    for part, (dx, dy) in zip(parts, offsets):
        part = torch.roll(part, dy, dims=3) if dy else part
        rows[dx] = rows[dx] + part if dx in rows else part
    return sum(torch.roll(x, dx, dims=2) if dx else x for dx, x in rows.items())


def masked_softmax(scores: Tensor, visible: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax over the visible scores of the last dimension, in fp32 at least.

    Masks with the smallest finite number: minus infinity would give NaN gradients in rows without
    visible scores. With `may_be_empty` such rows become zeros.
    """
    scores = scores if scores.dtype == torch.float64 else scores.float()
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~visible, 0.0) if may_be_empty else weights


def attend_jointly(first: Call, scores: Tensor, visible: Tensor, values: Values) -> Tensor:
    """Attention under one softmax over global and local keys, of queries in any layout.

    first: the call with scaled q (B, N, .., D) and only the global tokens of k and v. scores,
    visible (B, N or 1, .., K) of local keys. values: multiplies their weights with v.
    """
    num_global, unit = first.num_global, (1,) * (first.q.ndim - 4)
    if num_global:
        k_global, v_global = (x.unflatten(1, (-1, *unit)) for x in (first.k, first.v))
        to_global = first.q @ k_global.mT  # (B, N, .., G)
        if first.bias.to_global is not None:
            to_global = to_global + first.bias.to_global.unflatten(0, (-1, 1, *unit))
        scores = torch.cat([to_global, scores], dim=-1)
        visible = F.pad(visible, (num_global, 0), value=True)
    weights = masked_softmax(scores, visible, can_be_empty(num_global, first.valid_hw))
    weights = F.dropout(weights, first.dropout_p).to(first.v.dtype)
    out = values(weights[..., num_global:])
    return out + weights[..., :num_global] @ v_global if num_global else out


def can_be_empty(num_global: int, valid_hw: Tensor | None) -> bool:
    """Whether queries may have no keys: padding without global tokens."""
    return valid_hw is not None and num_global == 0
