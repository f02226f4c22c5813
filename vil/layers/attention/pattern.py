"""Attention restricted to an arbitrary 2-D pattern of keys, and to the global tokens.

Shapes: B batch, N heads, D head dim, X Y grid rows and columns, L = X*Y local tokens, G global
tokens, K keys.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vil.layers.attention import DEFAULT_PATTERN
from vil.layers.attention.base import TABLE
from vil.layers.attention.local import AttendedKeys, LocalAttention
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import (
    register_relative_bias,
    replace_parameter,
    resize_table,
    resize_tables,
    same_size,
)
from vil.ops import Case, Layout, LocalBias
from vil.ops.patterns import Pattern, parse_pattern
from vil.ops.reference import keys_of_pattern


class PatternAttention(LocalAttention):
    """Attention of local tokens to a pattern and global tokens, and of global tokens to all tokens.

    pattern: a `vil.ops.patterns.Pattern`, or its text, such as "axial | local:5".
    chunk: side, in tokens, of the chunks in which the pattern is computed. Affects only the speed.
    max_reach: the largest displacement, in rows and in columns, with its own entry in the bias
    table. Pairs that are farther apart use the outermost entries. With 0, the table covers all
    displacements of the pattern.
    backend: the implementation of local attention, "auto" or a name in `vil.ops.BACKENDS`.
    rel_pos: learn a relative position bias. If the pattern grows with the grid and max_reach is 0,
    `grid` is required. The table is sized for this grid, and interpolated on another one.

    Raises ValueError if the pattern is malformed, not defined on `grid`, or made for another number
    of heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        pattern: str | Pattern = DEFAULT_PATTERN,
        chunk: int = 8,
        max_reach: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        self.pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
        if self.pattern.heads not in (1, num_heads):
            raise ValueError(
                f"the pattern {self.pattern} has masks for {self.pattern.heads} heads, "
                f"but the attention has {num_heads} heads"
            )
        if chunk < 1 or max_reach < 0:
            raise ValueError(
                "`chunk` must be at least 1 and `max_reach` at least 0, "
                f"got {chunk} and {max_reach}"
            )
        self.chunk, self.max_reach = chunk, (max_reach, max_reach) if max_reach else None
        if self.grid is not None:
            self.window(self.grid)
        if self.rel_pos:
            if self.is_sized and self.grid is None:
                raise ValueError(
                    f"the pattern {self.pattern} grows with the grid, so `rel_pos` needs `grid` "
                    "or `max_reach` to set the size of the bias table"
                )
            register_relative_bias(self, self._table_size(self.grid or (1, 1)))

    @property
    def is_sized(self) -> bool:
        """Whether the size of the bias table depends on the grid."""
        return self.max_reach is None and self.pattern.reach is None

    def window(self, grid: Grid) -> Layout:
        """Return the layout of the pattern on a grid. The layout defines the keys of each query.

        Raises ValueError if the pattern is not defined on this grid.
        """
        return Layout(grid, self.chunk, self.pattern, self.max_reach)

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the attention output (B, N, L, D) of local queries q (B, N, L, D).

        k, v (B, N, G+L, D): keys and values, global tokens first. A bias table whose size depends
        on the grid is resized for the unpadded size of each image, `valid_hw`.
        """
        biases = self._biases_by_image(grid, valid_hw)
        if not biases:
            return super().attend_local(q, k, v, grid, valid_hw)
        images = zip(biases, *(x.split(1) for x in (q, k, v, valid_hw)))
        layout = self.window(grid)
        return torch.cat([self.attend(*qkv, layout, bias, hw) for bias, *qkv, hw in images])

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """Return the attention weights of local queries, see `LocalAttention.local_weights`."""
        biases = self._biases_by_image(grid, valid_hw)
        if not biases:
            return super().local_weights(q, k, grid, queries, valid_hw)
        images = zip(biases, *(x.split(1) for x in (q, k, valid_hw)))
        return torch.cat(
            [self.weights_under(bias, *qk, grid, queries, hw) for bias, *qk, hw in images]
        )

    def _biases_by_image(self, grid: Grid, valid_hw: Valid) -> list[LocalBias]:
        """Return the bias of each image; an empty list if all images have the same bias.

        Biases differ if the size of the bias table depends on the grid and images are padded.
        """
        if valid_hw is None or not (self.rel_pos and self.is_sized):
            return []
        sizes = (self.table_size, self._table_size(grid), 2 * valid_hw - 1)
        tables = resize_tables(self.local_relative_position_bias_table, *sizes, centered=True)
        return [self.bias(grid)._replace(table=table.mT) for table in tables]

    def bias_table(self, grid: Grid) -> Tensor:
        """Return the bias table (entries, N) for a grid, resized if necessary."""
        table, size = self.local_relative_position_bias_table, self._table_size(grid)
        if not self.is_sized or same_size(size, self.table_size):
            return table
        return resize_table(table, self.table_size, size)

    def _table_size(self, grid: Grid) -> Grid:
        """Return (rows, columns) of the bias table for a grid."""
        rows, cols = self.max_reach or self.pattern.reach or (grid[0] - 1, grid[1] - 1)
        return 2 * rows + 1, 2 * cols + 1

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the bias table for another grid, if its size depends on a grid.

        rule: the interpolation, a key of `pos_embed.RULES`.
        """
        if self.rel_pos and self.is_sized:
            table, size = self.local_relative_position_bias_table.detach(), self._table_size(grid)
            replace_parameter(self, TABLE, resize_table(table, self.table_size, size, rule))
            self.table_size = size

    @property
    def param_grid(self) -> Grid | None:
        """The grid for which the bias table is sized. None if there is no table, or if the size of
        the table does not depend on a grid."""
        if not (self.rel_pos and self.is_sized):
            return None
        rows, cols = self.table_size
        return (rows + 1) // 2, (cols + 1) // 2

    def backend_cases(self, grid: Grid, *, training: bool, **call: Any) -> Iterator[Case]:
        """Yield the `Case`s of local attention calls, see `Attention.backend_cases`."""
        for needs_grad in (True, False) if training else (False,):
            yield self.make_case(self.window(grid), training=needs_grad, **call)

    def attended(self, grid: Grid, query: int) -> AttendedKeys:
        """Return all L local tokens as possible keys of one local query.

        query: index of the query among the local tokens. The field `visible` of the result is False
        for keys that the query does not attend to.
        """
        entries, visible = keys_of_pattern(self.window(grid), *divmod(query, grid[1]))
        return AttendedKeys(torch.arange(len(entries)), entries, visible)

    def local_macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of the attention of local queries.

        Only query-key pairs of the pattern are counted.
        """
        layout = self.window(grid)
        pairs = layout.count_pairs() // layout.heads + grid[0] * grid[1] * self.num_global
        return 2 * pairs * self.dim

    def extra_repr(self) -> str:
        text = f"pattern={self.pattern}, chunk={self.chunk}, backend={self.backend}"
        return f"{super().extra_repr()}, {text}"
