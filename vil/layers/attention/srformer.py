"""Spatial-reduction attention: keys and values come from a downsampled map.

Source: Pyramid Vision Transformer, arXiv:2102.12122, section 3.3. As in the 2021 reference, with an
instance norm, and with global tokens that are not downsampled.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid, L = X*Y local tokens, G global tokens,
T = G+L, r ratio, R reduced tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.attention.base import Attention, AttentionWeights
from vil.layers.padding import Grid, Valid, real_cells
from vil.utils.lookup import lookup

RAGGED = {"pad": "zero-pad incomplete cells", "drop": "drop the tokens of incomplete cells"}
EPS = 1e-5


class SRAttention(Attention):
    """Every token attends to the global tokens and to one token per cell of r x r local tokens.

    ratio: r.
    ragged: "pad" zero-pads incomplete cells at the bottom and right. "drop" drops their tokens, as
    in the 2021 reference (published results need it). A map smaller than one cell is always padded.

    The instance norm is skipped for a single cell, which it would make zero.
    """

    shown = (*Attention.shown, "ratio", "ragged")
    has_relative_bias = False

    def __init__(
        self, dim: int, num_heads: int, *, ratio: int, ragged: str = "pad", **common
    ) -> None:
        super().__init__(dim, num_heads, **common)
        lookup(RAGGED, ragged, "ragged")
        if ratio < 1:
            raise ValueError(f"the ratio of spatial reduction must be at least 1, got {ratio}")
        self.ratio, self.ragged = ratio, ragged
        self.query, self.kv = self.linear(1), self.linear(2)
        self.proj = nn.Linear(dim, dim)
        self.proj_sr = nn.Conv2d(dim, dim, ratio, ratio, bias=False)

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """x (B, G+L, C), global tokens first -> (B, G+L, C)."""
        q = self.split_heads(self.query(x))  # (B, N, T, D)
        k, v, mask = self.keys_and_values(x, grid, valid_hw)
        return self.proj_drop(self.proj(self.merge_heads(self.sdpa(q, k, v, mask))))

    def keys_and_values(
        self, x: Tensor, grid: Grid, valid_hw: Valid
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (B, G+L, C) -> k, v (B, N, G+R, D), mask of padding (B, 1, 1, G+R) or None."""
        reduced, mask = self.reduce(x[:, self.num_global :], grid, valid_hw)
        kv = self.kv(torch.cat([x[:, : self.num_global], reduced.to(x.dtype)], dim=1))
        return *self.split_parts(kv, 2), mask

    def reduce(self, x: Tensor, grid: Grid, valid_hw: Valid) -> tuple[Tensor, Tensor | None]:
        """Local tokens (B, L, C) -> (B, R, C), mask of cells that are all padding or None."""
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
        limit = torch.tensor((rows, cols), device=valid_hw.device)
        valid_hw = torch.minimum(-(-valid_hw // self.ratio), limit)
        real = real_cells(valid_hw, (rows, cols)).flatten(1)[..., None]
        mask = self.padding_mask(valid_hw, (rows, cols), reduced.dtype)
        return spatial_norm(reduced, real), mask

    def cells(self, grid: Grid) -> Grid:
        """Rows and columns of the reduced map."""
        if self.ragged == "drop":
            return max(grid[0] // self.ratio, 1), max(grid[1] // self.ratio, 1)
        # positive operands only: ONNX rounds negative quotients toward zero
        rows, cols = ((n + self.ratio - 1) // self.ratio for n in grid)
        return rows, cols

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """See `Attention.attention_weights`. A key is a cell of `ratio` x `ratio` tokens."""
        q = self.split_heads(self.query(x[:, queries]))
        k, _, mask = self.keys_and_values(x, grid, valid_hw)
        weights = self.scores(q, k, mask).softmax(-1)
        return AttentionWeights(weights, self.num_global, grid, self.cells(grid), self.ratio)

    @property
    def min_export_side(self) -> int:
        """The least side with two cells."""
        return 2 * self.ratio

    def changed_since_2021(self) -> str | None:
        """Incomplete cells."""
        if self.ragged != "pad" or self.ratio <= 1:
            return None
        return (
            "the 2021 srformer dropped the tokens of incomplete cells: ragged='drop' (SR_RAGGED) "
            "reproduces its results"
        )

    def macs(self, grid: Grid) -> int:
        """The linear layers, the convolution, the scores and the values."""
        rows, cols = self.cells(grid)
        tokens, reduced = self.num_global + grid[0] * grid[1], rows * cols
        keys = self.num_global + reduced
        linears = (2 * tokens + 2 * keys + reduced * self.ratio**2) * self.dim**2
        return linears + 2 * tokens * keys * self.dim


def spatial_norm(x: Tensor, real: Tensor) -> Tensor:
    """Instance norm of x (B, R, C) over positions real (B or 1, R, 1), in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = real.sum(1, keepdim=True)
    mean = (wide * real).sum(1, keepdim=True) / count
    centered = wide - mean
    variance = (centered.square() * real).sum(1, keepdim=True) / count
    return torch.where(count > 1, centered * torch.rsqrt(variance + EPS), wide)
