"""The transformer block: pre-norm attention and MLP, each with a residual connection and DropPath.

Shapes: B batch, T tokens (global and local), C channels.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from vil.layers.attention import ATTENTIONS, Attention, build_attention, own_arguments
from vil.layers.attention.build import COMMON
from vil.layers.fused_attention import attend_fused, is_fused
from vil.layers.fused_block import fused_block
from vil.layers.fused_mlp import apply_norm_mlp
from vil.layers.padding import Grid
from vil.utils.lookup import lookup


class Block(nn.Module):
    """Transformer block: x = x + attn(norm1(x)), then x = x + mlp(norm2(x)).

    The MLP has 4C hidden channels and exact GELU.
    drop: dropout rate of the MLP.
    drop_path: rate of stochastic depth, for attention and MLP.
    norm_eps: epsilon of the layer norms.
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
        drops_nothing = type(self.drop_path) is DropPath and not self.training
        if not (drops_nothing or type(self.drop_path) is nn.Identity):
            x = x + self.attn_branch(x, grid, valid_hw)
            return x + self.mlp_branch(x)
        norm, attn = self.norm1, self.attn
        if valid_hw is None:
            y = fused_block(norm, attn, self.norm2, self.mlp, x, grid)
            if y is not None:
                return y
        if valid_hw is None and is_fused(norm, attn, x, residual=True):
            x = attend_fused(norm, attn, x, grid, residual=True)
        else:
            x = x + self.attn_branch(x, grid, valid_hw)
        return apply_norm_mlp(self.norm2, self.mlp, x, residual=True)

    def attn_branch(self, x: Tensor, grid: Grid, valid_hw: Tensor | None = None) -> Tensor:
        """Return the output of the attention branch for x (B, T, C), to be added to x."""
        if valid_hw is None and is_fused(self.norm1, self.attn, x):
            return self.drop_path(attend_fused(self.norm1, self.attn, x, grid))
        return self.drop_path(self.attn(self.norm1(x), grid, valid_hw))

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Return the output of the MLP branch for x (B, T, C), to be added to x."""
        return self.drop_path(apply_norm_mlp(self.norm2, self.mlp, x))

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of attention and MLP for one image."""
        tokens = self.attn.num_global + grid[0] * grid[1]
        return self.attn.macs(grid) + 8 * tokens * self.attn.dim**2


def build_block(fields: Mapping[str, Any]) -> Block:
    """Build a transformer block from a plain dict.

    fields: "attention" (a name in the registry `ATTENTIONS`), the arguments of this attention (see
    `build_attention`), and "drop", "drop_path" and "norm_eps" of `Block`.
    Raises ValueError for a missing field, and for an unknown name or field.
    """
    fields = dict(fields)
    name = fields.pop("attention", None)
    if name is None:
        raise ValueError(f"a block needs the field 'attention', one of {', '.join(ATTENTIONS)}")
    arguments = own_arguments(ATTENTIONS.load(name))
    of_block = [key for key in inspect.signature(Block).parameters if key != "attn"]
    known = dict.fromkeys((*COMMON, "rel_pos", *arguments, *of_block))
    for key in fields:
        lookup(known, key, f"field of a {name} block")
    options = {key: fields.pop(key) for key in of_block if key in fields}
    return Block(build_attention(name, **fields), **options)
