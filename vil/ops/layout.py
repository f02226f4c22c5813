"""The layout of a pattern on a grid: which key chunks each query chunk attends to, and their masks.

If a key chunk is only partly visible to a query chunk, this pair of chunks has a mask with an entry
for each query token and each key token. Incomplete chunks at the bottom and right of the grid are
padded with tokens to which no query attends.

Shapes: X Y grid rows and columns, L = X*Y tokens, w chunk side, W = w*w tokens of a chunk, R x C
chunks, Q = R*C, H heads if their patterns differ, else 1, E pairs of chunks, T masks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.patterns.base import Pairs, Pattern, Reach
from vil.ops.window import ChunkGrid
from vil.utils.transforms import untraced

PAIRS_AT_ONCE = 1 << 21  # pairs of tokens that are evaluated at a time
MAX_MASK_BYTES = 1 << 30
FULL, ABSENT = -1, -2  # indices that stand for a mask: all pairs visible, none visible

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout(ChunkGrid):
    """A pattern on a grid of tokens, divided into chunks of w x w tokens for computation.

    size: w. The result of attention does not depend on it.
    pattern: the rule that defines which keys each query attends to.
    max_reach: the largest displacement (rows, columns) that has its own entry in the bias table.
    Larger ones are clamped to it (Shaw et al., arXiv:1803.02155, section 3.2). By default, it is
    the pattern's reach or, if there is none, the largest displacement in the grid.

    Raises ValueError for a grid side or size below 1, for a pattern that is not defined on the
    grid, and for a symbolic grid (torch.export) if the pattern is not traceable.
    """

    pattern: Pattern
    max_reach: Reach | None = None

    def __post_init__(self) -> None:
        if min(self.grid) < 1 or self.size < 1:
            raise ValueError(
                f"grid and chunk must be positive, got grid {self.grid}, chunk {self.size}"
            )
        if self.symbolic and not self.pattern.traceable:
            raise ValueError(
                f"pattern {self.pattern} depends on the size of the grid, so the image size cannot "
                "be dynamic: export the model for one image size"
            )
        self.pattern.check_grid(self.grid)

    def repeats(self) -> bool:
        """Return False, because no query of a layout attends to a key twice."""
        return False

    @property
    def heads(self) -> int:
        """H: the number of heads if their patterns differ, 1 if all heads have the same pattern."""
        return self.pattern.heads

    @property
    def table_reach(self) -> Reach:
        """The largest displacement (rows, columns) that has its own entry in the bias table."""
        if self.max_reach is not None:
            return self.max_reach
        return self.pattern.reach or (self.grid[0] - 1, self.grid[1] - 1)

    @property
    def table_entries(self) -> int:
        """The number of bias table entries for each head."""
        top, left = self.table_reach
        return (2 * top + 1) * (2 * left + 1)

    def bias_index(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the indices into a flattened bias table for displacements (rows, cols).

        The table has an entry for each displacement from -`table_reach` to `table_reach`, with
        (0, 0) in the middle. Larger displacements are clamped.
        """
        (top, left) = self.table_reach
        rows, cols = rows.clamp(-top, top), cols.clamp(-left, left)
        return (rows + top) * (2 * left + 1) + cols + left

    @property
    def mask(self) -> Tensor:
        """Whether each query attends to each key, (H, L, L) bool, for H heads and L tokens.

        H is 1 if all heads have the same pattern. The masks of recently used layouts are cached.
        """
        return dense_mask(self)

    @property
    def lists(self) -> ChunkLists:
        """The chunk pairs to compute and their masks. Cached for recently used layouts."""
        return build_lists(self)

    @property
    def density(self) -> float:
        """The fraction of chunk pairs with at least one visible token pair, averaged over heads."""
        return len(self.lists.query) / (self.heads * math.prod(self.chunks) ** 2)

    def count_pairs(self) -> int:
        """Count the query-key pairs that are visible.

        If patterns differ by head, the count is summed over heads.
        """
        return self.lists.num_visible

    def chunk_tokens(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, columns), each (..., W): the grid positions of the W tokens of each chunk.

        chunks (...): row-major indices of chunks. For tokens that pad incomplete chunks, the rows
        or columns are outside the grid.
        """
        inside = torch.arange(self.tile)
        row, col = chunks // self.chunks[1], chunks % self.chunks[1]
        rows = row[..., None] * self.size + inside // self.size
        return rows, col[..., None] * self.size + inside % self.size

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return (steps, index): the displacements of the E pairs of chunks in `lists`.

        steps (S, 2) int64: the distinct displacements, query chunk minus key chunk, in rows and
        columns of chunks. index (E,): the displacement of each pair, as an index into `steps`.
        """
        (_, cols), lists = self.chunks, self.lists
        rows = lists.query // cols - lists.key // cols
        both = torch.stack([rows, lists.query % cols - lists.key % cols], 1)
        return both.unique(dim=0, return_inverse=True)

    def tile_masks(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Compute the masks (n, W, W) of n pairs of a query chunk and a key chunk of W tokens.

        Entry (i, q, k) is True if query q of pair i attends to key k.
        head, query, key (n,): the index of the head, query chunk and key chunk of each pair.
        """
        (query_row, query_col), (key_row, key_col) = map(self.chunk_tokens, (query, key))
        inside = (key_row < self.grid[0]) & (key_col < self.grid[1])  # (n, W)
        tokens = [query_row, query_col, key_row, key_col]
        if not self.pattern.invariant:  # masks of invariant patterns are shared: do not clamp
            tokens = [x.clamp(max=self.grid[at % 2] - 1) for at, x in enumerate(tokens)]
        queries, keys = (
            [x.unsqueeze(dim) for x in part] for part, dim in ((tokens[:2], 2), (tokens[2:], 1))
        )
        visible = self.pattern.visible(Pairs(self.grid, *queries, *keys))
        if self.heads > 1:
            visible = visible.expand(self.heads, len(head), self.tile, self.tile)
            visible = visible[head, torch.arange(len(head))]
        return visible.expand(len(head), self.tile, self.tile) & inside[:, None]


@dataclass(frozen=True)
class ChunkLists:
    """The E chunk pairs that are computed for a layout, sorted by head, query chunk, key chunk.

    Each pair has at least one visible pair of tokens.
    head, query, key (E,) int64: the indices of each pair's head, query chunk and key chunk.
    mask (E,) int64: index of each pair's mask in `masks`, or FULL if all pairs of tokens are
    visible.
    masks (T, W, W) bool: the distinct masks.
    num_visible: visible pairs of tokens, summed over heads.
    num_blind: tokens that attend to no token, summed over heads.
    """

    head: Tensor
    query: Tensor
    key: Tensor
    mask: Tensor
    masks: Tensor
    num_visible: int
    num_blind: int


@lru_cache(maxsize=8)
@untraced
def dense_mask(layout: Layout) -> Tensor:
    """Compute `Layout.mask`: whether each query token attends to each key token, (H, L, L) bool."""
    mask = layout.pattern.mask(layout.grid)
    return (mask if mask.ndim == 3 else mask[None]).contiguous()


@lru_cache(maxsize=64)
@untraced
def build_lists(layout: Layout) -> ChunkLists:
    """Find the chunk pairs that must be computed for a layout, and their masks.

    Logs a warning if some tokens attend to no token of the grid. Raises ValueError if the masks
    would take more than MAX_MASK_BYTES.
    """
    near = layout.pattern.chunk_pairs(layout.grid, layout.size)
    pairs = near.expand(layout.heads, -1, -1).nonzero()
    some, which = _distinct(layout, pairs)
    masks, number = _distinct_masks(layout, some)
    number = number[which]
    pairs, number = pairs[number != ABSENT], number[number != ABSENT]
    head, query, key = pairs.unbind(1)
    of_mask = F.pad(masks.sum(2), (0, 0, 0, 1), value=layout.tile)  # the last row is that of FULL
    num_keys = of_mask[number] * _real_tokens(layout)[query]  # (E, W)
    seen = torch.zeros(layout.heads, math.prod(layout.chunks), layout.tile, dtype=torch.int64)
    seen.index_put_((head, query), num_keys, accumulate=True)
    num_blind = layout.heads * layout.length - int((seen > 0).sum())
    if num_blind:
        log.warning(
            "pattern %s on %d x %d tokens: %d of %d tokens attend to no token of the grid",
            layout.pattern, *layout.grid, num_blind, layout.heads * layout.length,
        )  # fmt: skip
    return ChunkLists(head, query, key, number, masks, int(num_keys.sum()), num_blind)


def _distinct(layout: Layout, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Select the chunk pairs whose masks must be computed. Other pairs reuse one of these masks.

    If the pattern is not invariant, all pairs are selected. In an invariant pattern, pairs with the
    same head and displacement have the same mask, unless the border of the grid truncates their key
    chunks differently.
    pairs (n, 3): head, query chunk and key chunk.
    Returns (distinct, index): the selected pairs and, for each of the n pairs, the index of the
    selected pair with the same mask.
    """
    if not layout.pattern.invariant:
        return pairs, torch.arange(len(pairs))
    (rows, cols), (head, query, key) = layout.chunks, pairs.unbind(1)
    row, col = key // cols, key % cols
    kind = [head, query // cols - row, query % cols - col, row == rows - 1, col == cols - 1]
    _, which = torch.stack([x.long() for x in kind], 1).unique(dim=0, return_inverse=True)
    first = torch.zeros(int(which.max()) + 1, dtype=torch.int64)
    first[which] = torch.arange(len(pairs))  # any of the pairs
    return pairs[first], which


def _distinct_masks(layout: Layout, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (masks, index): the distinct masks (T, W, W), and the index of each pair's mask.

    pairs (n, 3): head, query chunk and key chunk. The index is FULL if all pairs of tokens are
    visible, and ABSENT if none is.
    """
    shape = (layout.tile, layout.tile)
    ends = {_packed(torch.zeros(1, *shape))[0]: ABSENT, _packed(torch.ones(1, *shape))[0]: FULL}
    numbers, masks, index = dict(ends), [], []
    for part in pairs.split(max(1, PAIRS_AT_ONCE // layout.tile**2)):
        tiles = layout.tile_masks(*part.unbind(1))
        for tile, bits in zip(tiles, _packed(tiles)):
            if bits not in numbers:
                numbers[bits] = len(masks)
                masks.append(tile)
            index.append(numbers[bits])
        if len(masks) * layout.tile**2 > MAX_MASK_BYTES:
            raise ValueError(
                f"pattern {layout.pattern} on {layout.grid[0]} x {layout.grid[1]} tokens: the "
                f"masks of its chunks take more than {MAX_MASK_BYTES >> 20} MiB: use a smaller grid"
            )
    masks = torch.stack(masks) if masks else torch.zeros(0, *shape, dtype=torch.bool)
    return masks, torch.tensor(index, dtype=torch.int64)


def _packed(tiles: Tensor) -> list[bytes]:
    """Pack the bits of each mask (n, W, W) to bytes, so that equal masks can be found."""
    return [row.tobytes() for row in np.packbits(tiles.flatten(1).numpy() != 0, axis=1)]


def _real_tokens(layout: Layout) -> Tensor:
    """Return which of the W tokens of each of the Q chunks lie in the grid, (Q, W) bool."""
    rows, cols = layout.chunk_tokens(torch.arange(math.prod(layout.chunks)))
    return (rows < layout.grid[0]) & (cols < layout.grid[1])
