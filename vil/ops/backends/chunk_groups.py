"""A grid cut into pieces that are computed alike: which chunks meet which, and batches of them.

Letters: B images, N heads, X Y grid, L = X*Y tokens, D channels, R x C chunks of W = w*w tokens; of
a cut: P groups of M query chunks and J key chunks each; of a batch of it: b images, n heads, p
groups.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.window import ALL_NINE, Window

NEEDLESS = 150_000  # scores of keys that do not exist, to be computed rather than several cuts


class Cut(NamedTuple):
    """Groups of query chunks that see key chunks at the same places, as a rectangle of groups.

    first, count, side: the first chunk, the number of groups and the query chunks of a group, each
    down and across; keys: the chunks that a group sees, from its own first; seen[i][j]: the number
    of the offset from the group's query chunk i to its key chunk j.
    """

    first: tuple[int, int]
    count: tuple[int, int]
    side: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    seen: tuple[tuple[int, ...], ...]

    @property
    def groups(self) -> int:
        return self.count[0] * self.count[1]

    @property
    def queries(self) -> int:
        """M, query chunks of a group."""
        return self.side[0] * self.side[1]


class Batch(NamedTuple):
    """Groups that are computed at once: a part of a cut, of the images and of the heads."""

    cut: Cut
    images: slice
    heads: slice


@lru_cache(maxsize=1024)
def cuts(window: Window, around: int) -> tuple[Cut, ...]:
    """Every query chunk once, with the key chunks that exist for it.

    Chunks in the inside of the grid are one cut, those along a border others. Where there are only
    two rows (or columns) of chunks, both see all keys, and are computed together. With `around` all
    chunks have neighbours on each side, and are one cut.
    """
    shared = window.offsets == ALL_NINE
    steps = (sorted(set(axis)) for axis in zip(*window.offsets))
    rows, cols = (_spans(n, s, around, shared) for n, s in zip(window.chunks, steps))
    number = {offset: place for place, offset in enumerate(window.offsets)}
    found = []
    for down, across in product(rows, cols):
        side = (down.side, across.side)
        keys = [
            (dx, dy)
            for dx, dy in product(down.keys, across.keys)
            if side != (1, 1) or (dx, dy) in number
        ]
        own = product(range(side[0]), range(side[1]))
        seen = tuple(tuple(number[dx - row, dy - col] for dx, dy in keys) for row, col in own)
        first, count = (down.first, across.first), (down.count, across.count)
        found.append(Cut(first, count, side, tuple(keys), seen))
    return tuple(found)


def chunks_around(window: Window, lanes: int) -> int:
    """How many chunks the grid gets on each side, so that all of it is one cut: 1, or 0.

    A cyclic grid gets those of its other side. Others get empty ones if that takes fewer scores
    than NEEDLESS, for all `lanes` (heads of all images): so small a call takes as long as it has
    cuts.
    """
    if window.cyclic:
        return 1
    pieces = cuts(window, 0)
    met = sum(cut.groups * cut.queries * len(cut.keys) for cut in pieces)
    needless = len(window.offsets) * window.chunks[0] * window.chunks[1] - met
    return int(len(pieces) > 1 and needless * window.tile**2 * lanes < NEEDLESS)


class _Span(NamedTuple):
    """The same along one side of the grid."""

    first: int
    count: int
    side: int
    keys: tuple[int, ...]


def _spans(chunks: int, steps: list[int], around: int, shared: bool) -> list[_Span]:
    """Runs of chunks for which the same steps lead to a chunk of the grid."""
    if around:
        return [_Span(0, chunks, 1, tuple(steps))]
    if chunks == 2 and shared:
        return [_Span(0, 1, 2, (0, 1))]

    def found(chunk: int) -> tuple[int, ...]:
        return tuple(step for step in steps if 0 <= chunk + step < chunks)

    runs = [(keys, list(run)) for keys, run in groupby(range(chunks), found)]
    return [_Span(run[0], len(run), 1, keys) for keys, run in runs]


def batches(cut: Cut, images: int, heads: slice, fit: int) -> Iterator[Batch]:
    """At most `fit` groups at a time: part of the grid, or all of it for some images and heads."""
    across = even_share(cut.count[1], fit)
    down = even_share(cut.count[0], fit // cut.count[1])
    b = even_share(images, fit // cut.groups)
    n = even_share(heads.stop - heads.start, fit // (cut.groups * images))
    for head, image in product(parts(heads, n), parts(slice(0, images), b)):
        for rows, cols in product(
            parts(slice(0, cut.count[0]), down), parts(slice(0, cut.count[1]), across)
        ):
            first = (cut.first[0] + rows.start, cut.first[1] + cols.start)
            count = (rows.stop - rows.start, cols.stop - cols.start)
            yield Batch(cut._replace(first=first, count=count), image, head)


def parts(whole: slice, size: int) -> list[slice]:
    """Parts of a range of at most `size`."""
    starts = range(whole.start, whole.stop, size)
    return [slice(start, min(start + size, whole.stop)) for start in starts]


def even_share(count: int, most: int) -> int:
    """The size of equal parts of at most `most`, or 1; only the last may be smaller."""
    parts = -(-count // max(1, most))
    return -(-count // parts)


def even(window: Window) -> bool:
    """Whether no chunk is cut by the end of the grid."""
    return all(side % window.size == 0 for side in window.grid)


def tiled(x: Tensor, window: Window, fill: float = 0.0) -> Tensor:
    """(B, N, L, D) -> (B, N, R, C, w, w, D): a view, or of a padded copy where chunks are cut."""
    (rows, cols), w = window.chunks, window.size
    x = x.unflatten(2, window.grid)
    if not even(window):
        x = F.pad(x, (0, 0, 0, cols * w - window.grid[1], 0, rows * w - window.grid[0]), value=fill)
    return x.unflatten(3, (cols, w)).unflatten(2, (rows, w)).transpose(3, 4)


def untiled(x: Tensor, window: Window) -> Tensor:
    """The reverse of `tiled`, padding dropped."""
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return x[:, :, : window.grid[0], : window.grid[1]].flatten(2, 3)


def bordered(x: Tensor, window: Window) -> Tensor:
    """(.., R, C, w, w, D) -> (.., R+2, C+2, w, w, D): a chunk more on each side, of the other one
    if the grid is cyclic, or else of zeros."""
    if not window.cyclic:
        return F.pad(x, (0,) * 6 + (1,) * 4)
    x = torch.cat([x[:, :, -1:], x, x[:, :, :1]], 2)
    return torch.cat([x[:, :, :, -1:], x, x[:, :, :, :1]], 3)


def unbordered(x: Tensor, window: Window) -> Tensor:
    """The reverse for sums: what came to the chunks around is added where they are from."""
    for axis in (2, 3):
        inside = x.narrow(axis, 1, x.shape[axis] - 2)
        if window.cyclic:
            inside.select(axis, -1).add_(x.select(axis, 0))
            inside.select(axis, 0).add_(x.select(axis, -1))
        x = inside
    return x


def queries_of(x: Tensor, batch: Batch) -> Tensor:
    """(B, N, R, C, w, w, D) -> (b, n, groups down, groups across, chunks down, chunks across, w, w,
    D): a view of the batch's query chunks."""
    (row, col), count, side = batch.cut.first, batch.cut.count, batch.cut.side
    rows, cols = slice(row, row + count[0] * side[0]), slice(col, col + count[1] * side[1])
    x = x[batch.images, batch.heads, rows, cols]
    return x.unflatten(3, (count[1], side[1])).unflatten(2, (count[0], side[0])).transpose(3, 4)


def keys_of(x: Tensor, batch: Batch, around: int) -> list[Tensor]:
    """(B, N, R, C, w, w, D) -> J views (b, n, groups down, groups across, w, w, D); with `around`
    x has as many chunks on each side of the grid."""
    return [_keys_at(x, batch, (dx + around, dy + around)) for dx, dy in batch.cut.keys]


def keys_at_once(x: Tensor, batch: Batch, around: int) -> list[Tensor]:
    """The same to be read only: where the chunks that a group sees fill a rectangle, one view with
    its rows and columns of chunks before the last three dimensions."""
    keys = batch.cut.keys
    down, across = (1 + max(axis) - min(axis) for axis in zip(*keys))
    if down * across > len(keys):
        return [view[:, :, :, :, None, None] for view in keys_of(x, batch, around)]
    return [_keys_at(x, batch, (keys[0][0] + around, keys[0][1] + around), (down, across))]


def _keys_at(x: Tensor, batch: Batch, first: tuple[int, int], size: tuple[int, ...] = ()) -> Tensor:
    """Slices of x from each group's own chunk plus `first` on, made in one step."""
    x = x[batch.images, batch.heads]
    (row, col), strides = batch.cut.first, x.stride()
    shape = (*x.shape[:2], *batch.cut.count, *size, *x.shape[4:])
    steps = (*strides[:4], *strides[2:4][: len(size)], *strides[4:])
    start = (row + first[0]) * strides[2] + (col + first[1]) * strides[3]
    return x.as_strided(shape, steps, x.storage_offset() + start)
