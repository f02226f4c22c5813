"""Divide the query chunks of a window or a layout into groups that can be computed together.

A block is a few query chunks that attend to the same key chunks. Usually it is a single query
chunk, but in a grid of 2 x 2 chunks it is all four. In a group, all blocks have equally many query
chunks and key chunks. Blocks that also have the same displacements and masks, such as the interior
of the grid, form a group of their own if they have at least MIN_SCORES scores. Such a group stores
its displacements and its mask only once.

Shapes: Q chunks of W tokens, E pairs of a query chunk and a key chunk, S displacements, T masks. In
a group: P blocks of M query chunks with J key chunks.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.layout import FULL, Layout
from vil.ops.window import Mask, Window
from vil.utils.transforms import untraced

MIN_SCORES = 1 << 16  # fewest scores of equal blocks that form a separate group
MAX_SHARED = 4  # most query chunks of a block


class ListGroup(NamedTuple):
    """P blocks of M query chunks with J key chunks, computed together. A chunk has W tokens.

    head: the head that this group belongs to; None if all heads have the same pattern.
    queries (P, M), keys (P, J): indices of the query chunks and of their key chunks.
    hidden (P or 1, M*W, J*W) bool: True where a query token must not attend to a key token; None if
    nothing is masked.
    steps (P or 1, M, J): the displacement (query chunk minus key chunk) of each key chunk, as an
    index into `Plan.steps`.
    The first dimension of hidden and steps is 1 if all blocks have the same values.
    """

    head: int | None
    queries: Tensor
    keys: Tensor
    hidden: Tensor | None
    steps: Tensor


class Plan(NamedTuple):
    """The query chunks of a window or a layout, divided into groups.

    window: the window or layout.
    sides: rows and columns of tokens in a chunk. They are those of the window, but at most those of
    the grid.
    steps (S, 2): the distinct displacements in tokens, query chunk minus key chunk.
    has_blind: whether some token of the grid attends to no token of the grid.
    """

    window: Window | Layout
    sides: tuple[int, int]
    groups: tuple[ListGroup, ...]
    steps: Tensor
    has_blind: bool

    @property
    def tile(self) -> int:
        """W, the number of tokens of a chunk."""
        return self.sides[0] * self.sides[1]

    @property
    def is_even(self) -> bool:
        """Whether all chunks are complete."""
        return all(n % side == 0 for n, side in zip(self.window.grid, self.sides))

    def bias_index(self) -> Tensor:
        """Return int64 indices (W, S, W) into the bias table.

        Entry (i, s, j) is for query token i and key token j of two chunks at displacement s.
        """
        rows, cols = (
            line[:, None, None] + step[:, None] - line
            for step, line in zip(self.steps.unbind(1), _positions(self.sides))
        )
        if isinstance(self.window, Layout):
            return self.window.bias_index(rows, cols)
        first = 2 * self.window.size - 1
        return (rows + first) * (2 * first + 1) + cols + first


class _Pairs(NamedTuple):
    """The E pairs of chunks to compute, sorted by head and query chunk.

    head, query, key (E,): indices of the head, query chunk and key chunk of each pair.
    step (E,): its displacement, as an index into `steps` (S, 2), in tokens.
    mask (E,): its mask, as an index into `masks` (T, W, W) bool, or FULL if everything is visible.
    """

    head: Tensor
    query: Tensor
    key: Tensor
    step: Tensor
    steps: Tensor
    mask: Tensor
    masks: Tensor


@lru_cache(maxsize=64)
@untraced
def make_plan(window: Window | Layout, device: torch.device) -> Plan:
    """Divide the query chunks of a window or a layout into groups that are computed together.

    device: the device of the groups' index tensors.
    """
    if isinstance(window, Layout):
        heads, sides, pairs = window.heads, (window.size,) * 2, _layout_pairs(window)
    else:
        rows, cols = (min(window.size, side) for side in window.grid)
        heads, sides = 1, (rows, cols)
        pairs = _window_pairs(window, sides)
    num_chunks = window.chunks[0] * window.chunks[1]
    kinds = torch.stack([pairs.step, pairs.mask], 1)
    sizes = (pairs.head * num_chunks + pairs.query).bincount(minlength=heads * num_chunks)
    first = sizes.cumsum(0) - sizes
    groups = []
    for head, of_head in enumerate(sizes.split(num_chunks)):
        for num_keys in of_head.unique().tolist():
            queries = (of_head == num_keys).nonzero()[:, 0]
            lists = first[head * num_chunks + queries, None] + torch.arange(num_keys)  # (.., J)
            scores = num_keys * (sides[0] * sides[1]) ** 2  # of a query chunk
            for block in _share_keys(pairs.key[lists]):
                size, of_block = scores * block.shape[1], lists[block]  # (P, M, J)
                for some, is_equal in _split_equal(kinds[of_block].flatten(1), size):
                    shared = of_block[some[:1]] if is_equal else of_block[some]
                    hidden = _hidden_keys(pairs, shared)
                    hidden = None if hidden is None else hidden.to(device)
                    keys = pairs.key[of_block[some, 0]]
                    tensors = (queries[block[some]], keys, pairs.step[shared])
                    chunks, keys, steps = (x.to(device) for x in tensors)
                    group = ListGroup(head if heads > 1 else None, chunks, keys, hidden, steps)
                    groups.append(group)
    has_blind = isinstance(window, Layout) and window.lists.num_blind > 0
    return Plan(window, sides, tuple(groups), pairs.steps, has_blind)


def _layout_pairs(layout: Layout) -> _Pairs:
    lists, (steps, step) = layout.lists, layout.steps()
    chunks = (lists.head, lists.query, lists.key)
    return _Pairs(*chunks, step, steps * layout.size, lists.mask, lists.masks)


def _window_pairs(window: Window, sides: tuple[int, int]) -> _Pairs:
    """Return the pairs of chunks of a window. sides: rows and columns of tokens in a chunk."""
    size, offsets = torch.tensor(window.chunks), torch.tensor(window.offsets)
    chunks = torch.cartesian_prod(*(torch.arange(n) for n in window.chunks))  # (Q, 2)
    near = chunks[:, None] + offsets  # (Q, K, 2)
    exists = ((near >= 0) & (near < size)).all(2) | window.cyclic
    query, offset = exists.nonzero().unbind(1)
    key = (near % size)[query, offset]  # (E, 2)
    is_exact = window.mask == Mask.EXACT
    kind = torch.stack([offset * is_exact, *(key == size - 1).long().unbind(1)], 1)
    _, kind = kind.unique(dim=0, return_inverse=True)
    masks, mask = [], torch.full_like(kind, FULL)
    for number in range(int(kind.max()) + 1):
        some = (kind == number).nonzero()[:, 0]
        tile = _tile_mask(window, sides, key[some[0]], offsets[offset[some[0]]], is_exact)
        if not tile.all():
            mask[some] = len(masks)
            masks.append(tile)
    tile = sides[0] * sides[1]
    masks = torch.stack(masks) if masks else torch.zeros(0, tile, tile, dtype=torch.bool)
    used, step = offset.unique(return_inverse=True)
    indices = (torch.zeros_like(query), query, key[:, 0] * window.chunks[1] + key[:, 1])
    return _Pairs(*indices, step, -offsets[used] * window.size, mask, masks)


def _tile_mask(
    window: Window, sides: tuple[int, int], key: Tensor, offset: Tensor, is_exact: bool
) -> Tensor:
    """Return which keys of a key chunk a query chunk attends to, (W, W) bool.

    key (2,): row and column of the key chunk. offset (2,): the offset from the query chunk to it.
    """
    visible = torch.ones(sides[0] * sides[1], sides[0] * sides[1], dtype=torch.bool)
    for axis, line in enumerate(_positions(sides)):
        visible &= key[axis] * window.size + line < window.grid[axis]
        if is_exact:
            visible &= (line[:, None] - line - offset[axis] * window.size).abs() <= window.size
    return visible


def _positions(sides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (rows, columns), each (W,): the positions of the tokens inside of a chunk."""
    rows, cols = (torch.arange(side) for side in sides)
    return rows.repeat_interleave(sides[1]), cols.repeat(sides[0])


def _hidden_keys(pairs: _Pairs, lists: Tensor) -> Tensor | None:
    """Return `ListGroup.hidden`, (P, M*W, J*W) bool; None if nothing is masked.

    lists (P, M, J): for each query chunk of P blocks, the indices of its J pairs.
    """
    masks = pairs.mask[lists]
    if (masks == FULL).all():
        return None
    hidden = torch.cat([~pairs.masks, pairs.masks.new_zeros(1, *pairs.masks.shape[1:])])
    return hidden[masks].transpose(2, 3).flatten(3).flatten(1, 2)  # FULL is the last


def _share_keys(keys: Tensor) -> Iterator[Tensor]:
    """Divide query chunks into blocks with the same key chunks. Yields indices (P, M) for each M.

    keys (n, J): the key chunks of each of n query chunks. If more than MAX_SHARED query chunks have
    the same key chunks, each of them is a block.
    """
    if not keys.shape[1]:
        yield torch.arange(len(keys))[:, None]
        return
    _, which, counts = keys.unique(dim=0, return_inverse=True, return_counts=True)
    order, sizes = which.argsort(stable=True), counts[which.sort().values]
    sizes = torch.where(sizes > MAX_SHARED, 1, sizes)
    for size in sizes.unique().tolist():
        yield order[sizes == size].unflatten(0, (-1, size))


def _split_equal(kinds: Tensor, scores: int) -> Iterator[tuple[Tensor, bool]]:
    """Group the equal rows of a matrix (P, n). Yields (row indices, whether the rows are equal).

    scores: the number of scores of a row. Equal rows that have fewer than MIN_SCORES together are
    yielded with others, as one last group of unequal rows.
    """
    if not kinds.shape[1]:  # chunks without keys
        yield torch.arange(len(kinds)), True
        return
    _, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    is_large = (counts * scores >= MIN_SCORES) | (counts == len(kinds))
    for kind in is_large.nonzero()[:, 0].tolist():
        yield (which == kind).nonzero()[:, 0], True
    rest = (~is_large)[which].nonzero()[:, 0]
    if len(rest):
        yield rest, False
