"""Linformer attention: keys and values are projected along the token axis to a fixed length.

Source: Linformer, arXiv:2006.04768, section 4. As in the original Vision Longformer code (2021),
global tokens are projected too, and all heads share the projections.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid, L = X*Y local tokens, G global tokens,
T = G+L, f projected tokens. `valid_hw` (B, 2): unpadded rows and columns of each image.
"""

import math

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, AttentionWeights
from vil.layers.linear import apply_linear
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import (
    replace_parameter,
    resize_table,
    resize_tables,
    same_size,
    square_side,
)


class LinformerAttention(Attention):
    """Attention of every token to f learned linear combinations of all tokens.

    num_features: f.
    share_kv: keys and values share the projection along the token axis, proj_k. Otherwise values
    use proj_v.
    grid: rows and columns of local tokens for which the projections are stored. For other grids,
    the forward pass interpolates them. Raises ValueError if grid is None.
    """

    shown = (*Attention.shown, "num_features", "share_kv", "grid")
    has_relative_bias = False

    def __init__(
        self, dim: int, num_heads: int, *, num_features: int, share_kv: bool = True, **common
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if self.grid is None:
            raise ValueError(
                "linformer attention needs `grid`, which sets the size of its projections"
            )
        self.num_features, self.share_kv = num_features, share_kv
        self.query, self.kv = self.linear(1), self.linear(2)
        self.proj = nn.Linear(dim, dim)
        for name in self.token_projections:
            table = torch.empty(self.num_global + math.prod(self.grid), num_features)
            nn.init.uniform_(table, -(num_features**-0.5), num_features**-0.5)
            self.register_parameter(name, nn.Parameter(table))

    @property
    def token_projections(self) -> tuple[str, ...]:
        """Names of the parameters that project along the token axis."""
        return ("proj_k",) if self.share_kv else ("proj_k", "proj_v")

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Apply attention to x (B, G+L, C): G global tokens, then the L local tokens of the grid.

        valid_hw (B, 2): unpadded rows and columns of each image. The projections along the token
        axis are resized to them. Returns x's shape.
        """
        x = self.hide_padding(x, valid_hw, grid)
        q = self.split_heads(apply_linear(self.query, x))  # (B, N, T, D)
        kv = apply_linear(self.kv, x)
        if valid_hw is not None:
            kv = kv.masked_fill(~self.real_tokens(valid_hw, grid)[..., None], 0.0)
        k, v = map(self.split_heads, self.project(kv, grid, valid_hw))  # (B, N, f, D) each
        out = self.merge_heads(self.sdpa(q, k, v))
        return self.proj_drop(apply_linear(self.proj, out))

    def project(self, kv: Tensor, grid: Grid, valid_hw: Valid) -> tuple[Tensor, Tensor]:
        """Project kv (B, T, 2C) from T to f tokens. Returns (keys, values), each (B, f, C).

        kv: keys and values of T tokens, concatenated along the channels. Padding tokens must be 0.
        """
        proj_k = self.fit(self.proj_k, grid, valid_hw).mT
        if self.share_kv:
            return (proj_k @ kv).chunk(2, dim=-1)
        k, v = kv.chunk(2, dim=-1)
        return proj_k @ k, self.fit(self.proj_v, grid, valid_hw).mT @ v

    def fit(self, table: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Return the projection `table` (the parameter proj_k or proj_v), resized to `grid`.

        Without `valid_hw`, all images share the result (T, f). valid_hw (B, 2): unpadded rows and
        columns of each image. With it, each image has its own projection: the result is (B, T, f).
        """
        if valid_hw is not None:
            return resize_projections(table, self.grid, grid, valid_hw, self.num_global)
        if same_size(grid, self.grid):
            return table
        return resize_projection(table, self.grid, grid, self.num_global)

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the projections for another grid.

        rule: the interpolation, a key of `pos_embed.RULES`.
        """
        for leaf in self.token_projections:
            table = getattr(self, leaf).detach()
            table = resize_projection(table, self.grid, grid, self.num_global, rule)
            replace_parameter(self, leaf, table)
        self.grid = grid

    def resize_weight(
        self, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
    ) -> Tensor | None:
        """Return a checkpoint's projection resized to the grid; None if it cannot be resized.

        leaf, shape: name and shape of the parameter in this module. value: the checkpoint's weight,
        whose grid is assumed to be square. rule: the interpolation, a key of `pos_embed.RULES`.
        """
        if leaf not in self.token_projections or value.ndim != 2 or value.shape[1:] != shape[1:]:
            return None
        side = square_side(len(value) - self.num_global)
        if not side:
            return None
        return resize_projection(value.double(), (side, side), self.grid, self.num_global, rule)

    @property
    def param_grid(self) -> Grid:
        """The grid that the projections are sized for."""
        return self.grid

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """Raise ValueError, because keys are linear combinations of tokens, not single tokens."""
        raise ValueError(
            "linformer attention has no attention map: its keys are linear combinations of all "
            "tokens, with weights of both signs"
        )

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image, in projections and in attention."""
        tokens = self.num_global + grid[0] * grid[1]
        return 4 * tokens * self.dim**2 + 4 * tokens * self.num_features * self.dim


def resize_projection(
    table: Tensor, old: Grid, new: Grid, num_global: int, rule: str = "linear"
) -> Tensor:
    """Resize a projection along the token axis to another grid of tokens.

    table (G + X*Y, f): the projection from G global tokens and the X x Y local tokens of grid `old`
    to f tokens. The weights of local tokens are interpolated like an image, then scaled by old area
    / new area, so that sums over tokens keep their magnitude.
    num_global: G. rule: the interpolation, a key of `pos_embed.RULES`.
    """
    local = resize_table(table[num_global:], old, new, rule)
    scale = (old[0] * old[1]) / (new[0] * new[1])
    return torch.cat([table[:num_global], local * scale])


def resize_projections(
    table: Tensor, old: Grid, new: Grid, valid_hw: Tensor, num_global: int
) -> Tensor:
    """Resize a projection to the unpadded size of each image. Returns (B, G+L, f).

    table (tokens, f): the projection from G global tokens and the tokens of grid `old` to f tokens.
    new: grid of the L local tokens of an image, with padding. The results for padding tokens are
    undefined.
    valid_hw (B, 2): unpadded rows and columns of each image. num_global: G.
    """
    local = resize_tables(table[num_global:], old, new, valid_hw)
    scale = (old[0] * old[1] / valid_hw.prod(1)).to(table)
    shared = table[:num_global].expand(len(valid_hw), -1, -1)
    return torch.cat([shared, local * scale[:, None, None]], dim=1)
