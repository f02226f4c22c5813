"""Full attention: every token attends to every token.

torch's scaled_dot_product_attention computes it. On a CPU, the compiled C++ backend of local
attention computes calls without bias, padding and dropout, unless it cannot run or is slower.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid, L = X*Y local tokens, G global tokens.
`valid_hw` (B, 2) holds the rows and columns of each image that are not padding.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vil.layers.attention.base import TABLE, Attention, AttentionWeights
from vil.layers.attention.overrides import overrides
from vil.layers.linear import apply_linear
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import (
    dense_bias,
    register_relative_bias,
    replace_parameter,
    resize_table,
    resize_tables,
    same_size,
)
from vil.ops import Case, Window
from vil.ops.dispatch import choose
from vil.ops.qkv_attention import NATIVE, attend_qkv
from vil.ops.window import SELF_CHUNK, Mask
from vil.utils.transforms import is_exporting, is_transformed

REPLACED = ("sdpa", "split_parts", "merge_heads")  # methods that the compiled backend replaces


class FullAttention(Attention):
    """Multi-head attention of all tokens, global and local, to all tokens.

    rel_pos: learn a relative position bias. Its table is sized for `grid` and is interpolated in
    the forward pass on another grid. Raises ValueError if rel_pos is True and grid is None.
    """

    shown = (*Attention.shown, "rel_pos")
    projections = ("qkv",)

    def __init__(self, dim: int, num_heads: int, *, rel_pos: bool = False, **common) -> None:
        super().__init__(dim, num_heads, **common)
        self.rel_pos = rel_pos
        self.qkv, self.proj = self.linear(3), nn.Linear(dim, dim)
        if rel_pos:
            if self.grid is None:
                raise ValueError(
                    "full attention with rel_pos needs `grid`, which sets the size of its bias "
                    "table"
                )
            register_relative_bias(self, table_size(self.grid))

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Apply attention to x (B, G+L, C): G global tokens, then the L local tokens of the grid.

        valid_hw (B, 2): unpadded rows and columns of each image. The padding is masked, and the
        bias table is resized to the unpadded size. Returns x's shape.
        """
        x = self.hide_padding(x, valid_hw, grid)
        out = self.attend_qkv(apply_linear(self.qkv, x), grid, valid_hw)
        return self.proj_drop(apply_linear(self.proj, out))

    def attend_qkv(self, qkv: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Return the attention output (B, G+L, C), before the output projection.

        qkv (B, G+L, 3C): queries, keys and values, concatenated along the channels.
        """
        if self.is_native(qkv, grid, valid_hw):
            window = one_chunk((1, qkv.shape[1]))
            return attend_qkv(qkv, window, num_heads=self.num_heads, scale=self.scale)
        q, k, v = self.split_parts(qkv, 3)  # (B, N, G+L, D) each
        bias = self.bias(grid, valid_hw) if self.rel_pos else None
        return self.merge_heads(self.sdpa(q, k, v, self.padding_mask(valid_hw, grid), bias))

    def is_native(self, qkv: Tensor, grid: Grid, valid_hw: Valid) -> bool:
        """Return whether `attend_qkv` should use the compiled backend for these arguments.

        Otherwise, torch's attention is used.
        """
        if valid_hw is not None or not self.is_tunable(qkv.device.type):
            return False
        if overrides(self, REPLACED) or qkv.shape[0] == 0:
            return False
        if is_exporting() or is_transformed(qkv):  # an operator has no jvp
            return False
        call = dict(batch=qkv.shape[0], dtype=qkv.dtype, device=qkv.device.type)
        case = self.make_case(one_chunk(grid), training=torch.is_grad_enabled(), **call)
        return not case.symbolic and choose(case) == NATIVE

    def is_tunable(self, device: str) -> bool:
        """Return whether the compiled backend supports this attention for images without padding.

        device: a device type such as "cpu".
        """
        return device == "cpu" and not self.rel_pos and not self.attn_drop

    def backend_cases(
        self, grid: Grid, *, training: bool, padded: bool = False, **call: Any
    ) -> Iterator[Case]:
        """Yield the `Case`s from which a backend is selected, see `Attention.backend_cases`.

        The cases describe only the local queries, although the backend computes the global queries
        too. Yields nothing for calls that always use torch's attention, such as those with padded
        images.
        """
        if not padded and self.is_tunable(call["device"]):
            for needs_grad in (True, False) if training else (False,):
                yield self.make_case(one_chunk(grid), training=needs_grad, **call)

    def bias(self, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Return the relative position bias (1, N, G+L, G+L) of G global, then L local tokens.

        valid_hw (B, 2): unpadded rows and columns of each image. If given, the bias is resized for
        each image: (B, N, G+L, G+L).
        """
        bias = self.local_bias(grid, valid_hw)
        if not self.num_global:
            return bias
        to_global = self.g2l_relative_position_bias[1][:, None]  # (N, 1, G)
        to_global = to_global.expand(len(bias), -1, grid[0] * grid[1], -1)
        first = self.global_bias(grid).expand(len(bias), -1, -1, -1)
        return torch.cat([first, torch.cat([to_global, bias], dim=3)], dim=2)

    def local_bias(self, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the relative position bias (1, N, L, L) of N heads for pairs of L local tokens.

        If `valid_hw` is given, the bias is resized for each image: (B, N, L, L). valid_hw (B, 2):
        unpadded rows and columns of each image.
        """
        if valid_hw is None:
            return dense_bias(self.table(grid), grid)[None]
        table, size = self.local_relative_position_bias_table, table_size(grid)
        tables = resize_tables(table, self.table_size, size, 2 * valid_hw - 1, centered=True)
        bias = dense_bias(tables.permute(1, 0, 2).flatten(1), grid)
        return bias.unflatten(0, (len(valid_hw), -1))

    def table(self, grid: Grid) -> Tensor:
        """Return the relative position table for a grid: ((2X-1) * (2Y-1), N) for N heads."""
        table, size = self.local_relative_position_bias_table, table_size(grid)
        if same_size(size, self.table_size):
            return table
        return resize_table(table, self.table_size, size)

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the bias table for another grid.

        rule: the interpolation, a key of `pos_embed.RULES`.
        """
        if self.rel_pos:
            table = self.local_relative_position_bias_table.detach()
            table = resize_table(table, self.table_size, table_size(grid), rule)
            replace_parameter(self, TABLE, table)
            self.table_size = table_size(grid)

    @property
    def param_grid(self) -> Grid | None:
        """The grid that the bias table is sized for; None without a bias table."""
        if not self.rel_pos:
            return None
        rows, cols = self.table_size
        return (rows + 1) // 2, (cols + 1) // 2

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """Return the attention weights of the given queries. See `Attention.attention_weights`."""
        q, k, _ = self.split_parts(self.qkv(x), 3)
        bias = self.bias(grid, valid_hw)[:, :, queries] if self.rel_pos else None
        scores = self.scores(q[:, :, queries], k, bias, self.padding_mask(valid_hw, grid))
        return AttentionWeights(scores.softmax(-1), self.num_global, grid, grid)

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image, in projections and in attention."""
        tokens = self.num_global + grid[0] * grid[1]
        return 4 * tokens * self.dim**2 + 2 * tokens**2 * self.dim


def one_chunk(grid: Grid) -> Window:
    """Return a window of local attention in which each token of a grid attends to all tokens."""
    return Window(grid, max(grid), Mask.CHUNKS, (SELF_CHUNK,))


def table_size(grid: Grid) -> Grid:
    """Return (rows, columns) of the relative position table for a grid (X, Y): (2X-1, 2Y-1)."""
    return 2 * grid[0] - 1, 2 * grid[1] - 1
