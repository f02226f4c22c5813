"""Divide the query chunks of a grid into groups of equal blocks, and groups into batches.

A block is a small rectangle of query chunks that attend to the same key chunks, often a single
query chunk. In a group, the key chunks are at the same offsets from every block. A batch is a part
of a group, for some images and heads.

Shapes: B images, N heads, R x C chunks of w x w tokens, D channels. In a batch: b images, n heads.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.scratch import even_share, split_range
from vil.ops.window import ALL_NINE, Window

MAX_EMPTY_SCORES = 150_000  # scores of empty chunks that cost less than several groups


class ChunkGroup(NamedTuple):
    """A rectangle of query chunks, divided into blocks.

    All query chunks of a block attend to the same key chunks. The key chunks are at the same
    offsets from every block.
    first: (row, column) of the first query chunk.
    count: (rows, columns) of blocks in the rectangle.
    side: (rows, columns) of query chunks in a block.
    keys: (row, column) of each key chunk of a block, relative to the block's first query chunk.
    offset_index[i][j]: index into `Window.offsets` of the offset from query chunk i to key chunk j
    of a block.
    """

    first: tuple[int, int]
    count: tuple[int, int]
    side: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    offset_index: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the group."""
        return self.count[0] * self.count[1]

    @property
    def num_queries(self) -> int:
        """M, the number of query chunks in a block."""
        return self.side[0] * self.side[1]


class Batch(NamedTuple):
    """A part of a `ChunkGroup` that is computed at once, for some images and heads.

    group: this part, as a smaller `ChunkGroup`.
    """

    group: ChunkGroup
    images: slice
    heads: slice


@lru_cache(maxsize=1024)
def chunk_groups(window: Window, halo: int) -> tuple[ChunkGroup, ...]:
    """Divide the query chunks of a window into groups with the same key offsets.

    halo: 1 if the grid is surrounded by extra chunks, else 0. With extra chunks, there is only one
    group. Without them, the interior of the grid, each border and each corner usually form separate
    groups.
    """
    shared = window.offsets == ALL_NINE
    steps = (sorted(set(axis)) for axis in zip(*window.offsets))
    rows, cols = (_spans(n, s, halo, shared) for n, s in zip(window.chunks, steps))
    number = {offset: index for index, offset in enumerate(window.offsets)}
    groups = []
    for down, across in product(rows, cols):
        side = (down.side, across.side)
        keys = [
            (dx, dy)
            for dx, dy in product(down.keys, across.keys)
            if side != (1, 1) or (dx, dy) in number
        ]
        queries = product(range(side[0]), range(side[1]))
        index = tuple(tuple(number[dx - row, dy - col] for dx, dy in keys) for row, col in queries)
        first, count = (down.first, across.first), (down.count, across.count)
        groups.append(ChunkGroup(first, count, side, tuple(keys), index))
    return tuple(groups)


def halo_size(window: Window, lanes: int) -> int:
    """Return 1 if the grid is to be surrounded by extra chunks (a halo), else 0.

    With a halo, all query chunks are computed as one group. A cyclic window always has a halo,
    another window only if the scores of the extra chunks take less time than several groups. lanes:
    number of images times number of heads.
    """
    if window.cyclic:
        return 1
    groups = chunk_groups(window, 0)
    pairs = sum(group.num_blocks * group.num_queries * len(group.keys) for group in groups)
    empty = len(window.offsets) * window.chunks[0] * window.chunks[1] - pairs
    return int(len(groups) > 1 and empty * window.tile**2 * lanes < MAX_EMPTY_SCORES)


class _Span(NamedTuple):
    """The fields of a `ChunkGroup`, except `offset_index`, along one axis: rows or columns."""

    first: int
    count: int
    side: int
    keys: tuple[int, ...]


def _spans(chunks: int, steps: list[int], halo: int, shared: bool) -> list[_Span]:
    """Divide the chunks along one axis into spans. All blocks of a span have the same key offsets.

    steps: the offsets of the window along the axis.
    halo: 1 if the grid is surrounded by extra chunks, else 0. With extra chunks, all neighbors
    exist, so there is only one span.
    shared: whether the window has all nine offsets. Without extra chunks, two chunks of such a
    window attend to the same two key chunks, so an axis of two chunks is a single block.
    """
    if halo:
        return [_Span(0, chunks, 1, tuple(steps))]
    if chunks == 2 and shared:
        return [_Span(0, 1, 2, (0, 1))]

    def inside(chunk: int) -> tuple[int, ...]:
        return tuple(step for step in steps if 0 <= chunk + step < chunks)

    runs = [(keys, list(run)) for keys, run in groupby(range(chunks), inside)]
    return [_Span(run[0], len(run), 1, keys) for keys, run in runs]


def batches(group: ChunkGroup, images: int, heads: slice, limit: int) -> Iterator[Batch]:
    """Yield batches that together cover all blocks of a group, for all images and a range of heads.

    limit: the maximum of blocks * images * heads in a batch. A limit below 1 counts as 1.
    """
    across = even_share(group.count[1], limit)
    down = even_share(group.count[0], limit // group.count[1])
    b = even_share(images, limit // group.num_blocks)
    n = even_share(heads.stop - heads.start, limit // (group.num_blocks * images))
    for head, image in product(split_range(heads, n), split_range(slice(0, images), b)):
        for rows, cols in product(
            split_range(slice(0, group.count[0]), down),
            split_range(slice(0, group.count[1]), across),
        ):
            first = (group.first[0] + rows.start, group.first[1] + cols.start)
            count = (rows.stop - rows.start, cols.stop - cols.start)
            yield Batch(group._replace(first=first, count=count), image, head)


def add_halo(x: Tensor, window: Window) -> Tensor:
    """Pad a tensor (B, N, R, C, w, w, D) by one chunk on each side of dims 2 and 3.

    The padding is zero or, in a cyclic window, a copy of the chunks of the opposite side.
    """
    if not window.cyclic:
        return F.pad(x, (0,) * 6 + (1,) * 4)
    x = torch.cat([x[:, :, -1:], x, x[:, :, :1]], 2)
    return torch.cat([x[:, :, :, -1:], x, x[:, :, :, :1]], 3)


def sum_halo(x: Tensor, window: Window) -> Tensor:
    """Apply the transpose of `add_halo`, for gradients. Returns the tensor without the halo.

    In a cyclic window, the halo is added to the chunks that it was copied from. Otherwise it is
    dropped.
    """
    for axis in (2, 3):
        inside = x.narrow(axis, 1, x.shape[axis] - 2)
        if window.cyclic:
            inside.select(axis, -1).add_(x.select(axis, 0))
            inside.select(axis, 0).add_(x.select(axis, -1))
        x = inside
    return x


def query_tiles(x: Tensor, batch: Batch) -> Tensor:
    """View the queries x (B, N, R, C, w, w, D) of a batch as blocks of query chunks.

    Returns (b, n, rows of blocks, columns of blocks, chunk rows in a block, chunk columns in a
    block, w, w, D), for b images and n heads.
    """
    (row, col), count, side = batch.group.first, batch.group.count, batch.group.side
    rows, cols = slice(row, row + count[0] * side[0]), slice(col, col + count[1] * side[1])
    x = x[batch.images, batch.heads, rows, cols]
    return x.unflatten(3, (count[1], side[1])).unflatten(2, (count[0], side[0])).transpose(3, 4)


def key_tiles(x: Tensor, batch: Batch, halo: int) -> list[Tensor]:
    """Return one view of the keys x for each key chunk of a block.

    View j has key chunk j of every block in the batch. For b images and n heads, it is (b, n, rows
    of blocks, columns of blocks, w, w, D). x (B, N, R, C, w, w, D) includes extra chunks around the
    grid if `halo` is 1.
    """
    return [_key_view(x, batch, (dx + halo, dy + halo)) for dx, dy in batch.group.keys]


def key_rectangles(x: Tensor, batch: Batch, halo: int) -> list[Tensor]:
    """Return the keys of a batch as one view of x if possible, else as one view per key chunk.

    A single view is possible if the key chunks of a block form a rectangle. Do not write to a view,
    because the key chunks of different blocks may overlap.
    x (B, N, R, C, w, w, D) includes extra chunks around the grid if `halo` is 1. For b images and n
    heads, a view is (b, n, rows of blocks, columns of blocks, rows of key chunks, columns of key
    chunks, w, w, D).
    """
    keys = batch.group.keys
    down, across = (1 + max(axis) - min(axis) for axis in zip(*keys))
    if down * across > len(keys):
        return [view[:, :, :, :, None, None] for view in key_tiles(x, batch, halo)]
    return [_key_view(x, batch, (keys[0][0] + halo, keys[0][1] + halo), (down, across))]


def _key_view(
    x: Tensor, batch: Batch, first: tuple[int, int], size: tuple[int, ...] = ()
) -> Tensor:
    """Return a view of x that has a rectangle of key chunks for every block in a batch.

    For b images and n heads, it is (b, n, rows of blocks, columns of blocks, *size, w, w, D).
    first: (row, column) of the rectangle's first key chunk, relative to the block's first query
    chunk. If x includes extra chunks around the grid, both numbers are 1 larger.
    size: (rows, columns) of the rectangle, or () for a single key chunk.
    """
    x = x[batch.images, batch.heads]
    (row, col), strides = batch.group.first, x.stride()
    shape = (*x.shape[:2], *batch.group.count, *size, *x.shape[4:])
    steps = (*strides[:4], *strides[2:4][: len(size)], *strides[4:])
    start = (row + first[0]) * strides[2] + (col + first[1]) * strides[3]
    return x.as_strided(shape, steps, x.storage_offset() + start)
