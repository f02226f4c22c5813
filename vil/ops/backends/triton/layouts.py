"""The layout of a pattern as kernel arguments: lists of chunks, and the masks of their pairs.

The tensors are built once for each layout and device, and are cached, because copying to the device
synchronizes and cannot be in a CUDA graph.

Shapes: N heads, H heads if their patterns differ, else 1, W = w*w tokens of a chunk, E pairs of
chunks, T masks, S steps (displacements between two chunks of a pair).
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
    """Lists of chunks, concatenated in tensors.

    They are the key chunks of each query chunk, the query chunks of each key chunk, or the query
    chunks of each step (displacement between the chunks of a pair).
    List i of head h has the pairs starts[h * stride + i] to starts[h * stride + i + 1] - 1.
    stride: the length of a row of starts, 0 if all heads have the same lists.
    chunks (E,): the chunk of each pair.
    masks (E,): the index of its mask in tiles; negative if all pairs of its tokens are visible.
    tiles (T, W, ceil(W / 64)) int64: masks, empty if there are none. A row has a bit for each key
    of a query token or, in mirrored lists, for each query of a key token.
    Indices are int32. No field is None, because Triton does not compile None inside a tuple.
    """

    starts: Tensor
    stride: int
    chunks: Tensor
    masks: Tensor
    tiles: Tensor


class Steps(NamedTuple):
    """The pairs of chunks of a layout, sorted by step: the displacement from key to query chunk.

    lists: the query chunks of each step.
    keys (E,) int32: the key chunk of each pair.
    count: the number of steps.
    span: the largest step plus one, in (rows, columns) of chunks.
    numbers (2*rows - 1, 2*cols - 1) int32: the number of each step, with (0, 0) in the middle; -1
    if there is no such step.
    """

    lists: Lists
    keys: Tensor
    count: int
    span: tuple[int, int]
    numbers: Tensor


@lru_cache(maxsize=64)
@untraced
def make_lists(layout: Layout, device: torch.device, mirrored: bool = False) -> Lists:
    """Return the key chunks of each query chunk or, if `mirrored`, the query chunks of each key
    chunk."""
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
    """Return (index, reach), to expand a layout's bias table to a table without clamping.

    index: the entry of the bias table for every displacement of tokens in the layout's pairs of
    chunks, row-major. reach: the largest displacement (rows, columns). Kernels read the expanded
    table (2*rows + 1, 2*columns + 1).
    """
    steps, w = layout.steps()[0], layout.size
    span = (steps.abs().amax(0) + 1).tolist() if len(steps) else (1, 1)
    reach = tuple(chunks * w - 1 for chunks in span)
    rows, cols = (torch.arange(-most, most + 1) for most in reach)
    return layout.bias_index(rows[:, None], cols[None, :]).flatten().to(device), reach


@lru_cache(maxsize=64)
@untraced
def _tiles(layout: Layout, device: torch.device, mirrored: bool) -> Tensor:
    """Return the T masks of a layout on a device, packed into bits.

    All `Lists` of the layout share this tensor.
    """
    masks = layout.lists.masks.mT if mirrored else layout.lists.masks
    masks = F.pad(masks, (0, -masks.shape[2] % 64)).unflatten(2, (-1, 64))
    bits = torch.ones((), dtype=torch.int64) << torch.arange(64)
    return torch.where(masks, bits, 0).sum(3).to(device)


def _sort(layout: Layout, lines: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Sort pairs of chunks by head and list. Returns (order, starts, stride).

    order: the permutation that sorts the pairs. starts, stride: two fields of `Lists`. lines: the
    number of the list of each pair. count: the number of lists per head.
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
