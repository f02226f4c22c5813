"""The entrance of a stage: patches, global tokens and absolute positions.

Letters: B images, c input channels, H W their size, X Y grid of patches, L = X*Y, G global
tokens, C width.
"""

import torch
from torch import Tensor, nn

from vil.layers.pos_embed import AbsoluteEmbedding, small_normal


class PatchEmbed(nn.Module):
    """A convolution whose kernel is its stride, fresh global tokens, the absolute position if any.

    Sizes that the patch does not divide lose their last rows and columns. norm_eps: None for no
    LayerNorm on patches.
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
        self.patch = patch
        self.proj = nn.Conv2d(in_chans, dim, patch, patch)
        self.norm_embed = nn.LayerNorm(dim, eps=norm_eps) if norm_eps is not None else nn.Identity()
        self.cls_token = small_normal(1, num_global, dim) if num_global else None
        self.position = position
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """x (B, c, H, W) -> tokens (B, G+L, C), global ones first, and the grid (X, Y)."""
        if x.ndim != 4:
            raise ValueError(f"images must be (B, c, H, W), got a shape of {tuple(x.shape)}")
        if min(x.shape[-2:]) < self.patch:
            raise ValueError(
                f"a map of {tuple(x.shape[-2:])} is smaller than the patch {self.patch}: "
                "use larger images"
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

    def macs(self, grid: tuple[int, int]) -> int:
        """Those of the convolution for one image."""
        return grid[0] * grid[1] * self.proj.weight.numel()
