"""Divide the query chunks of a window or a layout into groups that can be computed together.

In a group, all query chunks have the same number of key chunks. Query chunks that also have the
same displacements and masks, such as the interior of the grid, form a group of their own if there
are at least MIN_EQUAL of them. Such a group stores its displacements and its mask only once.

Shapes: Q chunks of W tokens, E pairs of a query chunk and a key chunk, S displacements, T masks. In
a group: P query chunks with J key chunks each.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.layout import FULL, Layout
from vil.ops.window import Mask, Window
from vil.utils.transforms import untraced

MIN_EQUAL = 4  # fewest query chunks with equal lists that form a separate group


class ListGroup(NamedTuple):
    """P query chunks with J key chunks each, which are computed together. A chunk has W tokens.

    head: the head that this group belongs to; None if all heads have the same pattern.
    queries (P,), keys (P, J): indices of the query chunks and of their key chunks.
    hidden (P or 1, W, J*W) bool: True where a query token must not attend to a key token; None if
    nothing is masked.
    steps (P or 1, J): the displacement (query chunk minus key chunk) of each key chunk, as an index
    into `Plan.steps`.
    The first dimension of hidden and steps is 1 if all query chunks have the same values.
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

    def bias_index(self) -> Tensor:
        """Return int64 indices (S, W, W) into the bias table.

        Entry (s, i, j) is for query token i and key token j of two chunks at displacement s.
        """
        rows, cols = (
            step[:, None, None] + line[:, None] - line
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
            lists = first[head * num_chunks + queries, None] + torch.arange(num_keys)  # (P, J)
            for some, is_equal in _split_equal(kinds[lists].flatten(1)):
                shared = lists[some[:1]] if is_equal else lists[some]
                hidden = _hidden_keys(pairs, shared)
                hidden = None if hidden is None else hidden.to(device)
                tensors = (queries[some], pairs.key[lists[some]], pairs.step[shared])
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
    """Return `ListGroup.hidden`, (P, W, J*W) bool; None if nothing is masked.

    lists (P, J): for each of P query chunks, the indices of its J pairs.
    """
    masks = pairs.mask[lists]
    if (masks == FULL).all():
        return None
    hidden = torch.cat([~pairs.masks, pairs.masks.new_zeros(1, *pairs.masks.shape[1:])])
    return hidden[masks].transpose(1, 2).flatten(2)  # FULL is the last


def _split_equal(kinds: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Group the equal rows of a matrix (P, n). Yields (row indices, whether the rows are equal).

    Rows that occur fewer than MIN_EQUAL times are yielded together as one last group of unequal
    rows.
    """
    if not kinds.shape[1]:  # chunks without keys
        yield torch.arange(len(kinds)), True
        return
    _, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    for kind in (counts >= MIN_EQUAL).nonzero()[:, 0].tolist():
        yield (which == kind).nonzero()[:, 0], True
    rest = (counts < MIN_EQUAL)[which].nonzero()[:, 0]
    if len(rest):
        yield rest, False
