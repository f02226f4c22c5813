"""Compute the memory of streaming: how many bytes of tensors each type of `RowSource` needs while
its rows are read.

Shapes: X Y grid of a stage, w chunk side, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from vil.layers.attention.base import Attention
from vil.layers.attention.full import FullAttention, table_size
from vil.layers.attention.longformer import LongformerAttention
from vil.layers.block import Block
from vil.models.stage import Stage
from vil.streaming.full_rows import FullRows, keys_of_part
from vil.streaming.local_rows import (
    SIDE,
    chunk_side,
    halo_of,
    is_cyclic,
    strip_context,
    window_of,
)
from vil.streaming.memory import attention_bytes, peak_of, strip_bytes
from vil.streaming.rows import StoredRows
from vil.streaming.tokens import part_size

# Rows of chunks in a strip, for the planner to choose from. In higher strips the neighbors, which
# are computed twice, would cost less than 2 % of the work.
CHUNKS = (1, 2, 4, 8, 16, 32)
MAX_QUERIES = 4096  # of full attention in a strip
SMALL = 2048  # tokens; a grid with fewer may need more memory than a larger grid


class Cost(NamedTuple):
    """Bytes of tensors that a `RowSource` holds. base: bytes that it holds between two reads. peak:
    maximum bytes during a read, including `base`, but excluding the rows that are returned."""

    base: int = 0
    peak: int = 0


class Dtypes(NamedTuple):
    """Dtypes in a stage. embedded: dtype of the tokens after the patch embedding. tokens: dtype of
    the tokens after a block. qkv: dtype of queries, keys and values."""

    embedded: torch.dtype
    tokens: torch.dtype
    qkv: torch.dtype


@dataclass
class StageCosts:
    """The memory costs of one stage on a grid (X, Y). row_bytes: bytes of one row of the stage's
    input map, with padding. counted: cache of peak bytes, which are measured once for strips of
    equal size."""

    stage: Stage
    grid: tuple[int, int]
    dtypes: Dtypes
    device: torch.device
    row_bytes: int
    counted: dict[tuple, int] = field(default_factory=dict)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stage.blocks

    def token_rows(self, count: int, dtype: torch.dtype | None = None) -> int:
        """Return the size in bytes of `count` rows of the stage's tokens. dtype: dtype of the
        tokens; None for their dtype after a block."""
        dtype = dtype or self.dtypes.tokens
        return count * self.grid[1] * self.stage.embed.proj.out_channels * dtype.itemsize

    def heights(self, index: int) -> list[int]:
        """Return the strip heights, in rows, that the planner can choose for block `index`, in
        ascending order."""
        attn, (rows, cols) = self.blocks[index].attn, self.grid
        if isinstance(attn, FullAttention):
            most = max(1, min(rows, MAX_QUERIES // cols))
            return sorted({-(-most // part) for part in (1, 2, 4, 8, 16, 32, 64)})
        side = chunk_side(attn)
        count = -(-rows // side)
        return [side * n for n in sorted({min(n, count) for n in CHUNKS})]

    def embed(self, source: Cost, copies: int = 1) -> Cost:
        """Return the memory cost of reading the tokens after the patch embedding of this stage.

        source: memory cost of reading the input map. copies: number of copies of the input rows in
        memory; 0 if they are a view of the caller's image.
        """
        embed, height = self.stage.embed, min(embed_height(self.stage), self.grid[0])
        pixels = height * embed.patch * self.row_bytes
        out = self.token_rows(height, self.dtypes.embedded)
        held = pixels * min(copies, 1)
        read = source.peak + pixels * copies
        if self.dtypes.embedded == torch.float64:  # torch copies the patches of a convolution
            inside = pixels
        else:  # oneDNN copies its weights and, of the first stage, its output
            inside = max(out, 2 * embed.proj.weight.nbytes)
        at_norm = (4 if embed.position is not None else 3) * out
        lines = 0
        if embed.position is not None:
            lines = sum(self.grid) * embed.proj.out_channels // 2 * self.dtypes.embedded.itemsize
        peak = max(read, source.base + held + inside + out, source.base + at_norm)
        return Cost(source.base + lines + out, peak + lines)

    def block(self, index: int, height: int, source: Cost, collects: bool) -> Cost:
        """Return the memory cost of reading the tokens after block `index`, in strips of `height`
        rows.

        source: memory cost of reading the block's input. collects: whether global tokens attend to
        the strips.
        """
        block, first = self.blocks[index], self.dtypes.embedded if not index else None
        if isinstance(block.attn, FullAttention):
            return Cost(0, self._full_bytes(block, height))
        window = window_of(block.attn, self.grid)
        halo = sum(halo_of(window)) * chunk_side(block.attn)
        context = min(height + halo, self.grid[0])
        x, kept = self.token_rows(context, first), self.token_rows(min(halo, context), first)
        if is_cyclic(window):
            ends = self.token_rows(min(2 * chunk_side(block.attn), self.grid[0]), first)
            is_buffered = context == self.grid[0] and height < context
            kept = ends + (x if is_buffered else kept)
        work = self._local_bytes(block, height, collects)
        out = self.token_rows(min(height, self.grid[0]))
        is_whole = height >= self.grid[0]
        base = source.base + kept + (0 if is_whole else out)
        return Cost(base, max(x + kept + source.peak, x + kept + work + source.base))

    def collect(self, index: int, source: Cost) -> Cost:
        """Return the memory cost of block `index` if only its global tokens are computed. source:
        memory cost of reading the block's input."""
        attn, size = self.blocks[index].attn, self.dtypes.qkv.itemsize
        height = min(embed_height(self.stage), self.grid[0])
        tokens = min(part_size(attn.dim, self.dtypes.tokens), self.grid[1] * height)
        wide = 0 if size >= 4 else 8 * attn.dim  # keys and values are cast to float32
        scores = attn.num_heads * attn.num_global * max(size, 4)
        x, work = self.token_rows(height), tokens * (3 * attn.dim * size + wide + scores)
        return Cost(source.base, x + max(source.peak, work + source.base))

    def _contexts(self, block: Block, height: int) -> set[tuple[int, int]]:
        """Return the sizes of a block's strips for which the memory must be counted.

        A size is (number of rows that a strip needs as input, number of rows of the strip). The
        largest size is always included. Smaller sizes, such as at the top or bottom of the grid,
        are included only if they have so few tokens that another attention backend may be selected.
        """
        rows, side, found = self.grid[0], chunk_side(block.attn), set()
        window = window_of(block.attn, self.grid)
        last = (rows - 1) // height * height
        middle = last // height // 2 * height
        for first in {0, middle, max(last - height, 0), last}:
            stop = min(first + height, rows)
            found.add((strip_context(rows, window, side, first, stop).rows, stop - first))
        most = max(found)
        return {each for each in found if each[0] * self.grid[1] <= SMALL} | {most}

    def _local_bytes(self, block: Block, height: int, collects: bool) -> int:
        """Return the peak bytes of tensors while a strip is computed, excluding its input."""
        attn = block.attn
        contexts = self._contexts(block, height)
        outside = ("outside", type(attn), attn.extra_repr(), attn.rel_pos, height, collects)
        inside = outside[1:-1]
        if outside not in self.counted:
            options = dict(cols=self.grid[1], dtype=self.dtypes.tokens, collects=collects)
            self.counted[outside] = max(
                strip_bytes(block, rows, device=self.device, **options) for rows in contexts
            )
        if inside not in self.counted:
            self.counted[inside] = max(self._attention_bytes(attn, n) for n, _ in contexts)
        return max(self.counted[inside], self.counted[outside])

    def _attention_bytes(self, attn: Attention, rows: int) -> int:
        """Return the peak bytes of attention for one strip; 0 for an attention without a window.
        rows: number of rows that the strip's queries attend to, including the strip itself.
        """
        if not isinstance(attn, LongformerAttention):
            return 0
        return attention_bytes(
            attn, attn.window((rows, self.grid[1])), self.dtypes.qkv, self.device
        )

    def _full_bytes(self, block: Block, height: int) -> int:
        attn, (rows, cols) = block.attn, self.grid
        like = ("full", attn.rel_pos, height)
        if like in self.counted:
            return self.counted[like]
        count = keys_of_part(attn, height * cols, part_size(attn.dim, self.dtypes.tokens))
        rows = min(rows, max(height, 2 * max(1, count // cols)))
        shape, stored = (rows, cols, attn.dim), self.token_rows(rows)

        def run() -> None:
            tensor = torch.empty(shape, dtype=self.dtypes.tokens, device=self.device)
            x_global = tensor.new_empty(1, attn.num_global, attn.dim)
            source = StoredRows(tensor, self.device)
            options = dict(height=height, dtype=self.dtypes.tokens)
            FullRows(block, source, x_global, **options).compute(0)

        table = 0
        if attn.rel_pos and table_size(self.grid) != attn.table_size:
            whole, part = table_size(self.grid), table_size((rows, cols))
            entries = whole[0] * whole[1] - part[0] * part[1]
            table = 2 * entries * attn.num_heads * self.dtypes.tokens.itemsize
        counted = max(0, peak_of(run) - stored) + table
        self.counted[like] = counted + counted // 32  # fewer keys were counted than there are
        return self.counted[like]


def embed_height(stage: Stage) -> int:
    """Return the number of token rows that the patch embedding of a stage computes at once."""
    return chunk_side(stage.blocks[0].attn) if len(stage.blocks) else SIDE


def probe_dtypes(stages: Sequence[Stage], channels: int, dtype: torch.dtype) -> list[Dtypes]:
    """Return the dtypes in each stage. To find them, the stages are run on one patch under the
    current autocast settings.

    channels: number of channels of the image. dtype: dtype of the image.
    """
    result, device = [], stages[0].embed.proj.weight.device
    for stage in stages:
        patch = stage.embed.patch
        x = torch.zeros(1, channels, patch, patch, dtype=dtype, device=device)
        tokens, _ = stage.embed(x)
        after, qkv = tokens, tokens.dtype
        for block in stage.blocks[:1]:
            attn = block.attn
            linear = attn.qkv if isinstance(attn, FullAttention) else attn.kv
            mixed = linear(block.norm1(tokens))
            after, qkv = tokens + attn.proj(mixed[..., : attn.dim]), mixed.dtype
            after = after + block.mlp(block.norm2(after))
        result.append(Dtypes(tokens.dtype, after.dtype, qkv))
        channels, dtype = tokens.shape[-1], after.dtype
    return result


def strip_macs(block: Block, grid: tuple[int, int], height: int, *, only_global: bool) -> int:
    """Return the multiply-accumulates of a block that runs in strips of `height` rows.

    grid: (X, Y). only_global: whether only the global tokens of the output are computed.
    """
    attn, (rows, cols) = block.attn, grid
    tokens, square = rows * cols, attn.dim**2
    num_strips = -(-rows // height)
    if isinstance(attn, FullAttention):
        again = 3 * square * tokens * num_strips
        return block.macs(grid) - 3 * square * tokens + 2 * square * tokens + again
    if only_global:
        return 2 * square * tokens + 2 * attn.num_global * tokens * attn.dim
    window, side = window_of(attn, grid), chunk_side(attn)
    if not isinstance(attn, LongformerAttention) or num_strips == 1:
        return block.macs(grid)
    more = -tokens
    for first in range(0, rows, height):
        context = strip_context(rows, window, side, first, min(first + height, rows))
        more += context.rows * cols
    return block.macs(grid) + 2 * square * more + attn.local_macs((1, more))
