"""The layout of a pattern as kernel arguments: lists of chunks, and the masks of their pairs.

The tensors are cached for each layout and device, because a copy to the device synchronizes, and a
CUDA graph cannot capture it.

Shapes: w chunk side, W = w*w tokens of a chunk, E pairs of chunks, T masks.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.layout import Layout
from vil.ops.patterns.base import Reach
from vil.utils.transforms import untraced


class Lists(NamedTuple):
    """Lists of chunks, which are concatenated in the tensor `chunks`.

    `make_lists` returns one list per query chunk, of its key chunks. With `mirrored`, it returns
    one list per key chunk, of its query chunks. `Steps` has one list per step, of query chunks.

    starts int32: list i of head h is chunks[s[n] : s[n + 1]], for s = starts.flatten() and
    n = h * stride + i.
    stride: the number of entries of `starts` per head; 0 if all heads have the same lists.
    chunks (E,) int32: the chunk indices of all lists, one for each of E pairs of chunks.
    masks (E,) int32: the index of each pair's mask in `tiles`; negative if the pair needs no mask.
    tiles (T, W, ceil(W / 64)) int64: the T distinct masks as bits. Each query token has a bit for
    each key token. With `mirrored`, each key token has a bit for each query token.
    """

    # no field may be None: Triton does not compile None inside a tuple
    starts: Tensor
    stride: int
    chunks: Tensor
    masks: Tensor
    tiles: Tensor


class Steps(NamedTuple):
    """The E pairs of chunks of a layout, sorted by their step (query chunk minus key chunk).

    lists: the query chunks of each step.
    keys (E,) int32: the key chunk of each pair, in the order of the query chunks in `lists`.
    count: the number of different steps.
    span: (rows, columns), each one more than the largest absolute step in this direction.
    numbers (2*rows - 1, 2*cols - 1) int32, for rows, cols = span: the index of each step in
    `lists`; -1 if no pair has this step. The step (0, 0) is in the middle.
    """

    lists: Lists
    keys: Tensor
    count: int
    span: tuple[int, int]
    numbers: Tensor


@lru_cache(maxsize=64)
@untraced
def make_lists(layout: Layout, device: torch.device, mirrored: bool = False) -> Lists:
    """Return the list of key chunks of each query chunk of a layout.

    mirrored: return the list of query chunks of each key chunk instead.
    """
    pairs = layout.lists
    lines, chunks = (pairs.key, pairs.query) if mirrored else (pairs.query, pairs.key)
    order, starts, stride = _sort(layout, lines, layout.chunks[0] * layout.chunks[1])
    return _on_device(layout, device, mirrored, starts, stride, chunks[order], pairs.mask[order])


@lru_cache(maxsize=64)
@untraced
def make_steps(layout: Layout, device: torch.device) -> Steps:
    """Return the pairs of chunks of a layout, sorted by their displacement."""
    pairs, (steps, number) = layout.lists, layout.steps()
    order, starts, stride = _sort(layout, number, len(steps))
    lists = _on_device(layout, device, False, starts, stride, pairs.query[order], pairs.mask[order])
    rows, cols = span = tuple((steps.abs().amax(0) + 1).tolist()) if len(steps) else (1, 1)
    numbers = torch.full((2 * rows - 1, 2 * cols - 1), -1, dtype=torch.int32)
    numbers[steps[:, 0] + rows - 1, steps[:, 1] + cols - 1] = torch.arange(len(steps)).int()
    keys = pairs.key[order].int().to(device)
    return Steps(lists, keys, len(steps), span, numbers.to(device))


@lru_cache(maxsize=64)
@untraced
def make_table_index(layout: Layout, device: torch.device) -> tuple[Tensor, Reach]:
    """Return (index, reach), which convert the bias table of a layout to a table for kernels.

    reach: (rows, cols), the largest displacement between tokens in the layout's pairs of chunks.
    index: `table[:, index]` is the table for kernels, flattened. It has 2*rows + 1 rows and
    2*cols + 1 columns, with an entry for each displacement up to `reach`. Displacements outside of
    the bias table get its outermost entries, so that kernels need not clamp displacements.
    """
    steps, w = layout.steps()[0], layout.size
    span = (steps.abs().amax(0) + 1).tolist() if len(steps) else (1, 1)
    reach = tuple(chunks * w - 1 for chunks in span)
    rows, cols = (torch.arange(-most, most + 1) for most in reach)
    return layout.bias_index(rows[:, None], cols[None, :]).flatten().to(device), reach


@lru_cache(maxsize=64)
@untraced
def _tiles(layout: Layout, device: torch.device, mirrored: bool) -> Tensor:
    """Return the T distinct masks of a layout, packed into bits: (T, W, ceil(W / 64)) int64.

    mirrored: transpose the masks, so that each key token has a bit for each query token.
    """
    masks = layout.lists.masks.mT if mirrored else layout.lists.masks
    masks = F.pad(masks, (0, -masks.shape[2] % 64)).unflatten(2, (-1, 64))
    bits = torch.ones((), dtype=torch.int64) << torch.arange(64)
    return torch.where(masks, bits, 0).sum(3).to(device)


def _sort(layout: Layout, lines: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Sort the pairs of chunks of a layout by head, and the pairs of a head by list (see `Lists`).

    lines: index of each pair's list, such as its query chunk. count: number of lists per head.
    Returns (order, starts, stride): the permutation that sorts the pairs, and two fields of
    `Lists`.
    """
    lines = layout.lists.head * count + lines
    sizes = lines.bincount(minlength=layout.heads * count)
    starts = F.pad(sizes.cumsum(0), (1, 0)).unfold(0, count + 1, max(1, count))
    return lines.argsort(stable=True), starts, count + 1 if layout.heads > 1 else 0


def _on_device(
    layout: Layout, device: torch.device, mirrored: bool, starts: Tensor, stride: int,
    *indices: Tensor,
) -> Lists:  # fmt: skip
    starts, chunks, masks = (x.to(torch.int32).contiguous().to(device) for x in (starts, *indices))
    return Lists(starts, stride, chunks, masks, _tiles(layout, device, mirrored))
