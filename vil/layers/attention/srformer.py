"""Spatial-reduction attention: keys and values are computed from a downsampled map.

Source: Pyramid Vision Transformer, arXiv:2102.12122, section 3.3. As in the original Vision
Longformer code, the downsampled tokens get an instance norm, and global tokens are not downsampled.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid, L = X*Y local tokens, G global tokens, T =
G+L, r ratio, R reduced tokens (cells of r x r local tokens). `valid_hw` (B, 2): unpadded rows and
columns of each image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.attention.base import Attention, AttentionWeights
from vil.layers.linear import apply_linear
from vil.layers.padding import Grid, Valid, downsample_valid, real_cells
from vil.utils.lookup import lookup

RAGGED = dict.fromkeys(("auto", "pad", "drop"))
EPS = 1e-5


class SRAttention(Attention):
    """Attention of every token to the global tokens and to downsampled local tokens.

    ratio: side of the squares of local tokens. A strided convolution reduces each square to one key
    and value.
    ragged: how to treat incomplete squares at the bottom and right. "pad" zero-pads them. "drop"
    drops their tokens, as in the original Vision Longformer code. "auto" is "pad", or "drop" once
    weights of the original code are loaded. A map smaller than one square is always padded.
    """

    shown = (*Attention.shown, "ratio", "ragged")
    has_relative_bias = False

    def __init__(
        self, dim: int, num_heads: int, *, ratio: int, ragged: str = "auto", **common
    ) -> None:
        super().__init__(dim, num_heads, **common)
        lookup(RAGGED, ragged, "ragged")
        if ratio < 1:
            raise ValueError(f"the ratio of spatial reduction must be at least 1, got {ratio}")
        self.ratio, self.is_open = ratio, ragged == "auto"
        self.ragged = "pad" if self.is_open else ragged
        self.query, self.kv = self.linear(1), self.linear(2)
        self.proj = nn.Linear(dim, dim)
        self.proj_sr = nn.Conv2d(dim, dim, ratio, ratio, bias=False)

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Apply attention to x (B, G+L, C): G global tokens, then the L local tokens of the grid.

        valid_hw (B, 2): unpadded rows and columns of each image. Returns x's shape.
        """
        x = self.hide_padding(x, valid_hw, grid)
        q = self.split_heads(apply_linear(self.query, x))  # (B, N, T, D)
        k, v, mask = self.keys_and_values(x, grid, valid_hw)
        out = self.merge_heads(self.sdpa(q, k, v, mask))
        return self.proj_drop(apply_linear(self.proj, out))

    def keys_and_values(
        self, x: Tensor, grid: Grid, valid_hw: Valid
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (k, v, mask) for x (B, G+L, C), where k and v are (B, N, G+R, D).

        mask (B, 1, 1, G+R): additive mask, -inf for keys that cover only padding, 0 for other keys.
        It is None if `valid_hw` is None.
        """
        reduced, mask = self.reduce(x[:, self.num_global :], grid, valid_hw)
        kept = torch.cat([x[:, : self.num_global], reduced.to(x.dtype)], dim=1)
        kv = apply_linear(self.kv, kept)
        return *self.split_parts(kv, 2), mask

    def reduce(self, x: Tensor, grid: Grid, valid_hw: Valid) -> tuple[Tensor, Tensor | None]:
        """Downsample local tokens x (B, L, C) to R tokens. Returns ((B, R, C), mask).

        The mask (B, 1, 1, G+R) is the one that `keys_and_values` returns.
        """
        if valid_hw is not None:
            x = x.masked_fill(~real_cells(valid_hw, grid).flatten(1)[..., None], 0.0)
        image = x.mT.unflatten(2, grid)
        rows, cols = self.cells(grid)
        # negative where rows or columns are dropped
        missing = (rows * self.ratio - grid[0], cols * self.ratio - grid[1])
        image = self.proj_sr(F.pad(image, (0, missing[1], 0, missing[0])))
        reduced = image.flatten(2).mT
        if valid_hw is None:
            return spatial_norm(reduced, torch.ones_like(reduced[:1, :, :1], dtype=bool)), None
        valid_hw = downsample_valid(valid_hw, self.ratio, limit=(rows, cols))
        real = real_cells(valid_hw, (rows, cols)).flatten(1)[..., None]
        return spatial_norm(reduced, real), self.padding_mask(valid_hw, (rows, cols))

    def cells(self, grid: Grid) -> Grid:
        """Return the (rows, columns) to which a grid is downsampled."""
        if self.ragged == "drop":
            return max(grid[0] // self.ratio, 1), max(grid[1] // self.ratio, 1)
        # positive operands only: ONNX rounds negative quotients toward zero
        rows, cols = ((n + self.ratio - 1) // self.ratio for n in grid)
        return rows, cols

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """Return the attention weights of the given queries. See `Attention.attention_weights`.

        After the global tokens, each key stands for a square of `ratio` x `ratio` local tokens.
        """
        q = self.split_heads(self.query(x[:, queries]))
        k, _, mask = self.keys_and_values(x, grid, valid_hw)
        weights = self.scores(q, k, mask).softmax(-1)
        return AttentionWeights(weights, self.num_global, grid, self.cells(grid), self.ratio)

    @property
    def min_export_side(self) -> int:
        """Smallest grid side, in tokens, that torch.export can trace with a dynamic size.

        The side must have two complete squares of `ratio` x `ratio` tokens, because torch.export
        treats a dimension of size 1 as constant.
        """
        return 2 * self.ratio

    def use_2021_rule(self) -> dict[str, Any]:
        if not self.is_open:
            return {}
        self.ragged, self.is_open = "drop", False
        return {"ragged": "drop"}

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image: projections, convolution and attention."""
        rows, cols = self.cells(grid)
        tokens, reduced = self.num_global + grid[0] * grid[1], rows * cols
        keys = self.num_global + reduced
        linears = (2 * tokens + 2 * keys + reduced * self.ratio**2) * self.dim**2
        return linears + 2 * tokens * keys * self.dim


def spatial_norm(x: Tensor, real: Tensor) -> Tensor:
    """Normalize x (B, R, C) over its R tokens, per image and channel, in at least float32.

    real (B or 1, R, 1) bool: the tokens that are used for the mean and variance. An image with only
    one such token is not normalized.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = real.sum(1, keepdim=True)
    mean = (wide * real).sum(1, keepdim=True) / count
    centered = wide - mean
    variance = (centered.square() * real).sum(1, keepdim=True) / count
    return torch.where(count > 1, centered * torch.rsqrt(variance + EPS), wide)
