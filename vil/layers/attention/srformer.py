"""Spatial-reduction attention: keys and values come from a coarser map, reduced by a convolution.

Source: Pyramid Vision Transformer, arXiv:2102.12122, section 3.3; as in the 2021 reference, with an
instance norm, and with global tokens that stand beside the reduced ones.

Letters: B images, N heads, D channels of a head, C = N*D, X Y grid, L = X*Y local tokens, G global
tokens, T = G+L, r ratio, R reduced tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.attention.base import Attention, padding_mask, real_tokens
from vil.utils.lookup import lookup

RAGGED = {"pad": "zeros complete the last cells", "drop": "tokens of incomplete cells are not seen"}
EPS = 1e-5


class SRAttention(Attention):
    """Every token attends to the global tokens and to one token per cell of r x r local ones.

    ratio: r.
    ragged: what happens to rows and columns beyond the last whole cell: "pad" completes the cell
    with zeros, "drop" leaves them unseen, as in the 2021 reference (published numbers need it). A
    map smaller than one cell is padded in both.
    The instance norm of a single cell would give zeros, whatever the image: it is left out there.
    """

    has_relative_bias = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        ratio: int,
        ragged: str = "pad",
        num_global: int = 1,
        grid: tuple[int, int] | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, num_global, attn_drop, proj_drop)
        lookup(RAGGED, ragged, "ragged")
        if ratio < 1:
            raise ValueError(f"the ratio of spatial reduction must be at least 1, got {ratio}")
        self.ratio, self.ragged = ratio, ragged
        self.query = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_sr = nn.Conv2d(dim, dim, ratio, ratio, bias=False)

    def forward(self, x: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """x (B, G+L, C), global tokens first; valid (B, 2) real rows and columns -> (B, G+L, C)."""
        q = self.split_heads(self.query(x))  # (B, N, T, D)
        reduced, mask = self.reduce(x[:, self.num_global :], grid, valid)
        kv = self.kv(torch.cat([x[:, : self.num_global], reduced.to(x.dtype)], dim=1))
        k, v = self.split_parts(kv, 2)  # (B, N, G+R, D) each
        mask = None if mask is None else mask.to(q.dtype)
        return self.proj_drop(self.proj(self.merge_heads(self.dense(q, k, v, mask))))

    def reduce(
        self, x: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Local tokens (B, L, C) -> reduced ones (B, R, C), and the mask of those without any real
        token.
        """
        if valid is not None:
            x = x.masked_fill(~real_tokens(valid, grid, 0)[..., None], 0.0)
        image = x.mT.unflatten(2, grid)
        rows, cols = self.cells(grid)
        # negative where rows or columns are dropped
        missing = (rows * self.ratio - grid[0], cols * self.ratio - grid[1])
        image = self.proj_sr(F.pad(image, (0, missing[1], 0, missing[0])))
        reduced = image.flatten(2).mT
        if valid is None:
            return spatial_norm(reduced, torch.ones_like(reduced[:1, :, :1], dtype=bool)), None
        limit = torch.tensor((rows, cols), device=valid.device)
        valid = torch.minimum(-(-valid // self.ratio), limit)
        real = real_tokens(valid, (rows, cols), 0)[..., None]
        mask = padding_mask(valid, (rows, cols), self.num_global, reduced.dtype)
        return spatial_norm(reduced, real), mask

    def cells(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the reduced map."""
        if self.ragged == "drop":
            return max(grid[0] // self.ratio, 1), max(grid[1] // self.ratio, 1)
        # of positive numbers alone: ONNX rounds quotients of negative ones towards zero
        rows, cols = ((n + self.ratio - 1) // self.ratio for n in grid)
        return rows, cols

    def macs(self, grid: tuple[int, int]) -> int:
        """The linears, the convolution, the scores and the values."""
        rows, cols = self.cells(grid)
        tokens, reduced = self.num_global + grid[0] * grid[1], rows * cols
        keys = self.num_global + reduced
        linears = (2 * tokens + 2 * keys + reduced * self.ratio**2) * self.dim**2
        return linears + 2 * tokens * keys * self.dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ratio={self.ratio}, ragged={self.ragged}"


def spatial_norm(x: Tensor, real: Tensor) -> Tensor:
    """Instance norm of x (B, R, C) over the positions where real (B or 1, R, 1); one alone stays.

    Biased variance, no scale and shift; statistics in float32 (float64 for float64 input).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = real.sum(1, keepdim=True)
    mean = (wide * real).sum(1, keepdim=True) / count
    centred = wide - mean
    variance = (centred.square() * real).sum(1, keepdim=True) / count
    return torch.where(count > 1, centred * torch.rsqrt(variance + EPS), wide)
