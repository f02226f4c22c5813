"""Full attention: every token sees every token.

Letters: B images, N heads, D channels of a head, C = N*D, X Y grid, L = X*Y local tokens, G global
tokens.
"""

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, padding_mask
from vil.layers.pos_embed import (
    dense_bias,
    register_relative_bias,
    replace_parameter,
    resize_table,
    resize_tables,
    same_size,
)


class FullAttention(Attention):
    """Plain multi-head attention over all tokens, global and local alike.

    rel_pos: a bias by relative position, whose table has the size of `grid`; on other grids it is
    resized on the fly.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_global: int = 1,
        grid: tuple[int, int] | None = None,
        rel_pos: bool = False,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, num_global, attn_drop, proj_drop)
        self.rel_pos = rel_pos
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        if rel_pos:
            if grid is None:
                raise ValueError(
                    "full attention with rel_pos needs the grid its bias table is made for"
                )
            self.table_size = (2 * grid[0] - 1, 2 * grid[1] - 1)
            register_relative_bias(self, self.table_size, num_heads, num_global)

    def forward(self, x: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """x (B, G+L, C), global tokens first; valid (B, 2) real rows and columns -> (B, G+L, C).

        With `valid` each image has the bias of its own grid, whatever it was padded to.
        """
        q, k, v = self.split_parts(self.qkv(x), 3)  # (B, N, G+L, D) each
        mask = None if valid is None else padding_mask(valid, grid, self.num_global, q.dtype)
        if self.rel_pos:
            bias = self.bias(grid, valid).to(q.dtype)
            mask = bias if mask is None else mask + bias
        return self.proj_drop(self.proj(self.merge_heads(self.dense(q, k, v, mask))))

    def bias(self, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """(1, N, G+L, G+L), or (B, ...) with `valid`."""
        bias = self.local_bias(grid, valid)
        if not self.num_global:
            return bias
        many, length = len(bias), grid[0] * grid[1]
        to_local, to_global = self.g2l_relative_position_bias  # (N, G) each
        corner = self.g2g_relative_position_bias.expand(many, -1, -1, -1)
        left = torch.cat([corner, to_global[:, None].expand(many, -1, length, -1)], dim=2)
        right = torch.cat([to_local[:, :, None].expand(many, -1, -1, length), bias], dim=2)
        return torch.cat([left, right], dim=3)

    def local_bias(self, grid: tuple[int, int], valid: Tensor | None) -> Tensor:
        """(1 or B, N, L, L)."""
        table, size = self.local_relative_position_bias_table, (2 * grid[0] - 1, 2 * grid[1] - 1)
        if valid is not None:
            tables = resize_tables(table, self.table_size, size, 2 * valid - 1, centred=True)
            every = dense_bias(tables.permute(1, 0, 2).flatten(1), grid)
            return every.unflatten(0, (len(valid), -1))
        if not same_size(size, self.table_size):
            table = resize_table(table, self.table_size, size)
        return dense_bias(table, grid)[None]

    def set_grid(self, grid: tuple[int, int], rule: str = "linear") -> None:
        """Resize the bias table for good."""
        if self.rel_pos:
            size = (2 * grid[0] - 1, 2 * grid[1] - 1)
            table = self.local_relative_position_bias_table.detach()
            table = resize_table(table, self.table_size, size, rule)
            replace_parameter(self, "local_relative_position_bias_table", table)
            self.table_size = size

    def macs(self, grid: tuple[int, int]) -> int:
        """The projections, the scores and the values of all tokens."""
        tokens = self.num_global + grid[0] * grid[1]
        return 4 * tokens * self.dim**2 + 2 * tokens**2 * self.dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rel_pos={self.rel_pos}"
