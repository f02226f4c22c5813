"""Run a block of local attention in strips. A strip consists of complete rows of chunks.

A strip attends to its own chunks, to the rows of chunks directly above and below it, and to the
global tokens. These rows form a small grid, on which `vil.ops.local_attention` runs with the same
distances, masks and incomplete chunks at the border as on the full grid.

Shapes: X Y grid, C channels, G global tokens, n rows of a strip with its neighbors, T = n*Y tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vil.layers.attention.base import Attention
from vil.layers.attention.longformer import LongformerAttention
from vil.layers.block import Block
from vil.ops import Window
from vil.streaming.global_rows import GlobalRows
from vil.streaming.rows import RowBuffer, RowSource, StripRows
from vil.streaming.tokens import finish_tokens, map_parts, part_size, parts

SIDE = 8  # rows of the smallest strip of an attention without a window


class Context(NamedTuple):
    """The small grid that is needed to compute a strip: the strip and the rows it attends to.

    runs: the rows of the small grid from top to bottom, as ranges (first row, end) of the full
    grid. queries: where the strip is in the small grid, as a slice of its rows.
    """

    runs: tuple[tuple[int, int], ...]
    queries: slice

    @property
    def rows(self) -> int:
        """Number of rows of the strip and its neighbors together."""
        return sum(stop - first for first, stop in self.runs)


def is_cyclic(window: Window | None) -> bool:
    """Return whether a window wraps around at the border of the grid."""
    return window is not None and window.cyclic


def halo_of(window: Window | None) -> tuple[int, int]:
    """Return (above, below), the numbers of rows of chunks that a query attends to above and below
    its own row of chunks. Each number is 0 or 1."""
    steps = [0] if window is None else [offset[0] for offset in window.offsets]
    return int(min(steps) < 0), int(max(steps) > 0)


def strip_context(rows: int, window: Window | None, side: int, first: int, stop: int) -> Context:
    """Return the small grid that is needed to compute the strip of rows `first` to `stop`.

    rows: rows of the full grid. window: window on the full grid; None if queries attend only to
    global tokens. side: side of a chunk. The strip must consist of complete rows of chunks.

    With a cyclic window, a strip at one end of the full grid also needs the row of chunks at the
    other end. The last row of chunks of the full grid may have fewer rows than the others. If the
    small grid contains it, it is the last there too.
    """
    up, down = (side * n for n in halo_of(window))
    if not is_cyclic(window):
        start = max(first - up, 0)
        return Context(((start, min(stop + down, rows)),), slice(first - start, stop - start))
    last = (rows - 1) // side * side  # first row of the last row of chunks
    count = -(-(stop - first) // side) + (up + down) // side
    if count >= last // side + 1:
        return Context(((0, rows),), slice(first, stop))
    if first == 0 and up:
        return Context(((0, stop + down), (last, rows)), slice(0, stop))
    if stop == rows and down:
        start = first - up
        return Context(((0, side), (start, rows)), slice(side + up, side + up + stop - first))
    return Context(((first - up, min(stop + down, rows)),), slice(up, up + stop - first))


class LocalRows(StripRows):
    """A `RowSource` that computes the local tokens after a block of local attention.

    source: the block's input. x_global (1, G, C): the global tokens of the input. height: number
    of rows in a strip, a multiple of `chunk_side`. dtype: dtype of the output. collect: computes
    the global tokens of the output; None to skip them. With `collect`, the caller must compute
    every strip exactly once, in order.
    """

    def __init__(
        self,
        block: Block,
        source: RowSource,
        x_global: Tensor,
        *,
        height: int,
        dtype: torch.dtype,
        collect: GlobalRows | None = None,
    ) -> None:
        shape = (source.rows, source.cols, source.channels, dtype, source.device)
        super().__init__(*shape, height=height)
        self.side = chunk_side(block.attn)
        assert height % self.side == 0, (height, self.side)
        self.block, self.x_global, self.collect = block, x_global, collect
        self.buffer, self.source = RowBuffer(source), source
        self.window = window_of(block.attn, (source.rows, source.cols))
        self.ends: dict[tuple[int, int], Tensor] = {}  # first and last rows of a cyclic grid

    def context(self, strip: int) -> Context:
        """Return the rows that are needed to compute a strip. strip: index of the strip."""
        first = strip * self.height
        stop = min(first + self.height, self.rows)
        return strip_context(self.rows, self.window, self.side, first, stop)

    def compute(self, strip: int) -> Tensor:
        x, context = self.gather(strip)
        return compute_strip(self.block, x, self.x_global, context.queries, self.collect)

    def gather(self, strip: int) -> tuple[Tensor, Context]:
        """Read the rows that a strip needs. Returns (rows (n, Y, C), context)."""
        context = self.context(strip)
        last = self.context(self.num_strips - 1)
        if not self.ends and max(len(context.runs), len(last.runs)) > 1:
            # The first and the last row of chunks attend to each other, in a cyclic window. They
            # are read now, because the output of this strip may overwrite the source.
            end = (self.rows - 1) // self.side * self.side
            runs = ((end, self.rows), (0, self.side))
            self.ends = {run: self.source.read(*run) for run in runs}
        up = halo_of(self.window)[0] * self.side
        keep = (strip + 1) * self.height - up
        if context.runs == ((0, self.rows),) and is_cyclic(self.window):
            keep = 0  # a small cyclic grid, every strip of which needs all rows
        x, at = self.source.new(context.rows), 0
        for first, stop in context.runs:
            rows = x[at : at + stop - first]
            if (first, stop) in self.ends:
                rows.copy_(self.ends[first, stop])
            else:
                self.buffer.fill(rows, first, keep)
            at += stop - first
        return x, context


def chunk_side(attn: Attention) -> int:
    """Return the smallest strip height for an attention module, in rows. It is the chunk side for
    attention with a window, and SIDE for other attention."""
    return attn.window_size if isinstance(attn, LongformerAttention) else SIDE


def window_of(attn: Attention, grid: tuple[int, int]) -> Window | None:
    """Return the window of an attention on a grid (X, Y); None if its queries attend only to global
    tokens."""
    return attn.window(grid) if isinstance(attn, LongformerAttention) else None


def compute_strip(
    block: Block, x: Tensor, x_global: Tensor, queries: slice, collect: GlobalRows | None
) -> Tensor:
    """Return the output of a block for the rows of a strip.

    x (n, Y, C): the block's input for the strip and its neighbors. x_global (1, G, C): the global
    tokens of the input. queries: the rows of the strip in x. collect: computes the global tokens of
    the output; None to skip them.
    """
    attn, (rows, cols, channels) = block.attn, x.shape
    size = part_size(channels, x.dtype)
    tokens = x.flatten(0, 1)
    wanted = slice(queries.start * cols, queries.stop * cols)
    kv = _keys_and_values(block, tokens, x_global, size)
    own = tokens[wanted]
    if collect is not None:
        collect.add(own, size, kv[attn.num_global :][wanted])
    q = map_parts(lambda part: attn.query(block.norm1(own[part])), len(own), size)
    k, v = attn.split_parts(kv[None], 2)
    if isinstance(attn, LongformerAttention):
        padded = q.new_zeros(len(tokens), channels) if len(q) < len(tokens) else q
        if padded is not q:
            padded[wanted] = q
        q = attn.split_heads(padded[None])
        del padded
        out = attn.attend_local(q, k, v, (rows, cols), None)[:, :, wanted]
    else:
        out = attn.attend_local(attn.split_heads(q[None]), k, v, (rows, cols), None)
    del q, k, v, kv
    y = finish_tokens(block, tokens[wanted], attn.merge_heads(out)[0], attn.proj)
    return y.unflatten(0, (-1, cols))


def _keys_and_values(block: Block, tokens: Tensor, x_global: Tensor, size: int) -> Tensor:
    """Return a tensor of keys and values, first of `x_global`, then of `tokens`.

    x_global (1, G, C). tokens (T, C). Returns (G+T, 2C). size: maximum number of tokens to process
    at once.
    """
    first = block.attn.kv(block.norm1(x_global))[0]
    kv = first.new_empty(len(first) + len(tokens), first.shape[-1])
    kv[: len(first)] = first
    for part in parts(len(tokens), size):
        kv[len(first) :][part] = block.attn.kv(block.norm1(tokens[part]))
    return kv
