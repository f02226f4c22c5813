"""Run a block of full attention in strips of query rows.

Keys and values are not stored, but recomputed for each strip.

Shapes: X Y grid, N heads, C channels, G global tokens, Q queries of a strip, K keys at a time.
"""

import torch
from torch import Tensor

from vil.layers.attention.full import FullAttention
from vil.layers.block import Block
from vil.streaming.rows import RowSource, StripRows
from vil.streaming.softmax import OnlineSoftmax
from vil.streaming.tokens import finish_tokens, map_parts, part_size, parts

SCORE_BYTES = 1 << 24  # of the scores of a strip and a part of the keys


class FullRows(StripRows):
    """A `RowSource` that computes the local tokens after a block of full attention.

    Computing the first strip also sets `global_tokens`, the global tokens after the block. source:
    the block's input, which is read in full for each strip. x_global (1, G, C): the input's global
    tokens. height: number of rows in a strip. dtype: dtype of the output.
    """

    def __init__(
        self,
        block: Block,
        source: RowSource,
        x_global: Tensor,
        *,
        height: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (source.rows, source.cols, source.channels, dtype, source.device)
        super().__init__(*shape, height=height)
        self.block, self.source, self.x_global = block, source, x_global
        self.global_tokens = x_global if not x_global.shape[1] else None
        self.bias = FullBias(block.attn, (source.rows, source.cols))

    def compute(self, strip: int) -> Tensor:
        """Return the rows (height, Y, C) of a strip. The first call also sets `global_tokens`."""
        first = strip * self.height
        stop = min(first + self.height, self.rows)
        x = self.source.read(first, stop).flatten(0, 1)
        y = self._attend(x, first * self.cols)
        if self.global_tokens is None:
            self.global_tokens = self._attend(self.x_global[0], None)[None]
        return y.unflatten(0, (-1, self.cols))

    def _attend(self, x: Tensor, first: int | None) -> Tensor:
        """Return the block's output for the tokens x (Q, C).

        first: index of x[0] among the local tokens of the image; None if x holds the global tokens.
        """
        block, attn = self.block, self.block.attn
        size = part_size(self.channels, self.dtype)
        q = map_parts(lambda part: self._project(x[part])[:, : attn.dim], len(x), size)
        softmax = OnlineSoftmax(attn.split_heads(q[None])[0], attn.scale)
        del q
        self._add(softmax, self.x_global[0], first, None)
        count = keys_of_part(attn, len(x), size)
        for rows in parts(self.rows, max(1, count // self.cols)):
            tokens = self.source.read(rows.start, rows.stop).flatten(0, 1)
            for part in parts(len(tokens), count):
                self._add(softmax, tokens[part], first, rows.start * self.cols + part.start)
            del tokens
        out = attn.merge_heads(softmax.result()[None])[0]
        del softmax
        return finish_tokens(block, x, out, attn.proj)

    def _add(
        self, softmax: OnlineSoftmax, tokens: Tensor, query: int | None, key: int | None
    ) -> None:
        """Let a range of queries attend to tokens (K, C).

        softmax: has the queries, and accumulates their attention. query: index of the first query
        among the local tokens; None if the queries are the global tokens. key: index of tokens[0]
        among the local tokens; None if `tokens` are the global tokens.
        """
        if not len(tokens):
            return
        attn = self.block.attn
        _, k, v = attn.split_parts(self._project(tokens)[None], 3)
        bias = self.bias.pairs(query, softmax.q.shape[1], key, len(tokens))
        softmax.add(k[0], v[0], bias)

    def _project(self, tokens: Tensor) -> Tensor:
        """Return the queries, keys and values (K, 3C) of tokens (K, C)."""
        return self.block.attn.qkv(self.block.norm1(tokens))


def keys_of_part(attn: FullAttention, num_queries: int, most: int) -> int:
    """Return the number of keys to process at once, so that the scores fit into SCORE_BYTES.
    num_queries: number of queries that attend to these keys. most: upper limit of the result."""
    bias = 4 if attn.rel_pos else 1  # the bias needs memory for its indices and its values
    return max(1, min(most, SCORE_BYTES // (4 * bias * attn.num_heads * max(1, num_queries))))


class FullBias:
    """The relative position bias of full attention, computed for ranges of queries and keys."""

    def __init__(self, attn: FullAttention, grid: tuple[int, int]) -> None:
        self.attn, self.grid = attn, grid
        if attn.rel_pos:
            self.table = attn.table(grid).mT  # (N, (2X-1)*(2Y-1))

    def pairs(
        self, query: int | None, num_queries: int, key: int | None, num_keys: int
    ) -> Tensor | None:
        """Return the bias for a range of queries and a range of keys, or None if there is no bias.

        The bias is broadcastable to (N, num_queries, num_keys). query: index of the first query
        among the local tokens; None if the queries are the global tokens. key: index of the first
        key among the local tokens; None if the keys are the global tokens.
        """
        if not self.attn.rel_pos:
            return None
        if query is None and key is None:
            return self.attn.g2g_relative_position_bias
        if query is None:
            return self.attn.g2l_relative_position_bias[0][:, :, None]
        if key is None:
            return self.attn.g2l_relative_position_bias[1][:, None]
        (rows, cols), device = self.grid, self.table.device
        q = torch.arange(query, query + num_queries, device=device)[:, None]
        k = torch.arange(key, key + num_keys, device=device)
        down, across = q // cols - k // cols + rows - 1, q % cols - k % cols + cols - 1
        return self.table[:, down * (2 * cols - 1) + across]
