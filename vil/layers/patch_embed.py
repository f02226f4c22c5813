"""Patch embedding of a stage, with its global tokens and absolute position embedding.

Shapes: B batch, c input channels, H W input size, X Y grid of patches, L = X*Y local tokens, G
global tokens, C channels.
"""

import torch
from torch import Tensor, nn

from vil.layers.padding import Grid
from vil.layers.pos_embed import AbsoluteEmbedding, small_normal


class PatchEmbed(nn.Module):
    """Patch convolution that prepends global tokens and can add an absolute position embedding.

    patch: side of a patch, in rows and columns of the input. Rows and columns beyond the last
    complete patch are dropped. norm_eps: epsilon of the LayerNorm after the convolution; None for
    no LayerNorm. drop: dropout rate of the tokens.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        patch: int,
        *,
        num_global: int,
        position: AbsoluteEmbedding | None,
        norm_eps: float | None,
        drop: float,
    ) -> None:
        super().__init__()
        self.patch, self.num_global = patch, num_global
        self.proj = nn.Conv2d(in_chans, dim, patch, patch)
        self.norm_embed = nn.LayerNorm(dim, eps=norm_eps) if norm_eps is not None else nn.Identity()
        self.cls_token = small_normal(1, num_global, dim) if num_global else None
        self.position = position
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Map x (B, c, H, W) to (tokens (B, G+L, C), grid (X, Y)). Global tokens come first.

        Raises ValueError if x does not have four dimensions or is smaller than a patch.
        """
        if x.ndim != 4:
            raise ValueError(f"images must be (B, c, H, W), got a shape of {tuple(x.shape)}")
        if min(x.shape[-2:]) < self.patch:
            raise ValueError(
                f"the input of a stage is {x.shape[-2]}x{x.shape[-1]} (rows x columns), smaller "
                f"than its patches of {self.patch}x{self.patch}: use larger images"
            )
        x = self.proj(x)
        grid = (x.shape[2], x.shape[3])
        tokens = self.norm_embed(x.flatten(2).mT)
        if self.cls_token is not None:
            first = self.cls_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([first, tokens], dim=1)
        if self.position is not None:
            tokens = tokens + self.position(grid)
        return self.drop(tokens), grid

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of the convolution for one image.

        grid: rows and columns of patches.
        """
        return grid[0] * grid[1] * self.proj.weight.numel()

    def extra_repr(self) -> str:
        return f"patch={self.patch}, num_global={self.num_global}"
