"""The transformer block: pre-norm attention and MLP, each with a residual connection and DropPath.

Shapes: B batch, T tokens (global and local), C channels.
"""

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from vil.layers.attention.base import Attention
from vil.layers.padding import Grid


class Block(nn.Module):
    """Transformer block: x + attn(norm1(x)), then x + mlp(norm2(x)).

    The MLP has 4C hidden channels and exact GELU. drop: dropout rate of the MLP.
    """

    def __init__(
        self, attn: Attention, *, drop: float = 0.0, drop_path: float = 0.0, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(attn.dim, eps=norm_eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(attn.dim, eps=norm_eps)
        self.mlp = Mlp(attn.dim, 4 * attn.dim, drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, valid_hw: Tensor | None = None) -> Tensor:
        """Apply the block to x (B, T, C).

        valid_hw (B, 2): rows and columns of each image that are not padding; None for no padding.
        """
        x = x + self.drop_path(self.attn(self.norm1(x), grid, valid_hw))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def macs(self, grid: Grid) -> int:
        """Return the multiply-accumulates for one image."""
        tokens = self.attn.num_global + grid[0] * grid[1]
        return self.attn.macs(grid) + 8 * tokens * self.attn.dim**2
