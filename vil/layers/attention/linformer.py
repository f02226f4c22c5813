"""Linformer attention: keys and values are projected along the token axis to a fixed few.

Source: Linformer, arXiv:2006.04768, section 4; as in the 2021 reference, global tokens are
projected too and the heads share the projections.

Letters: B images, N heads, D channels of a head, C = N*D, X Y grid, L = X*Y local tokens, G global
tokens, T = G+L, f projected tokens.
"""

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, real_tokens
from vil.layers.pos_embed import (
    replace_parameter,
    resize_table,
    resize_tables,
    same_size,
)


class LinformerAttention(Attention):
    """Every token attends to f mixtures of all tokens.

    num_features: f; it may exceed T.
    share_kv: values are projected with the keys' projection; else they have proj_v.
    grid: the grid the projections (T, f) are made for; on others they are resized on the fly.
    Raises ValueError without a grid.
    """

    has_relative_bias = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int,
        share_kv: bool = True,
        num_global: int = 1,
        grid: tuple[int, int] | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, num_global, attn_drop, proj_drop)
        if grid is None:
            raise ValueError("linformer attention needs the grid its projections are made for")
        self.grid, self.num_features, self.share_kv = grid, num_features, share_kv
        self.query = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        for name in ("proj_k",) if share_kv else ("proj_k", "proj_v"):
            table = torch.empty(num_global + grid[0] * grid[1], num_features)
            nn.init.uniform_(table, -(num_features**-0.5), num_features**-0.5)
            self.register_parameter(name, nn.Parameter(table))

    def forward(self, x: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """x (B, G+L, C), global tokens first; valid (B, 2) real rows and columns -> (B, G+L, C).

        With `valid` each image has the projections of its own grid, whatever it was padded to.
        """
        q = self.split_heads(self.query(x))  # (B, N, T, D)
        kv = self.kv(x)
        if valid is not None:
            kv = kv.masked_fill(~real_tokens(valid, grid, self.num_global)[..., None], 0.0)
        mixtures = self.project(kv, grid, valid)
        k, v = (self.split_heads(rows) for rows in mixtures)  # (B, N, f, D) each
        return self.proj_drop(self.proj(self.merge_heads(self.dense(q, k, v))))

    def project(
        self, kv: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """kv (B, T, 2C), zero in the padding -> the mixtures of keys and of values (B, f, C)."""
        proj_k = self.fit(self.proj_k, grid, valid).mT
        if self.share_kv:
            return (proj_k @ kv).chunk(2, dim=-1)
        k, v = kv.chunk(2, dim=-1)
        return proj_k @ k, self.fit(self.proj_v, grid, valid).mT @ v

    def fit(self, table: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """A projection for another grid than the one it was made for: (T, f) or (B, T, f)."""
        if valid is not None:
            return resize_projections(table, self.grid, grid, valid, self.num_global)
        if same_size(grid, self.grid):
            return table
        return resize_projection(table, self.grid, grid, self.num_global)

    def set_grid(self, grid: tuple[int, int], rule: str = "linear") -> None:
        """Resize the projections for good."""
        for leaf in ("proj_k",) if self.share_kv else ("proj_k", "proj_v"):
            table = getattr(self, leaf).detach()
            table = resize_projection(table, self.grid, grid, self.num_global, rule)
            replace_parameter(self, leaf, table)
        self.grid = grid

    def macs(self, grid: tuple[int, int]) -> int:
        """The linears, the two projections of tokens, the scores and the values."""
        tokens = self.num_global + grid[0] * grid[1]
        return 4 * tokens * self.dim**2 + 4 * tokens * self.num_features * self.dim

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_features={self.num_features}, "
            f"share_kv={self.share_kv}, grid={self.grid}"
        )


def resize_projection(
    table: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    num_global: int,
    rule: str = "linear",
) -> Tensor:
    """(G + old X*Y, f) -> (G + new X*Y, f), rows of global tokens as they are.

    Local rows are resized as an image, and scaled by the ratio of the areas, so that the sums over
    tokens keep their size.
    """
    local = resize_table(table[num_global:], old, new, rule)
    scale = (old[0] * old[1]) / (new[0] * new[1])
    return torch.cat([table[:num_global], local * scale])


def resize_projections(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], valid: Tensor, num_global: int
) -> Tensor:
    """(G + old X*Y, f) -> (B, G + new X*Y, f): `resize_projection` to the valid (B, 2) rows and
    columns of each image, which lie at the top left of the new grid.

    What stands beyond them has no meaning.
    """
    local = resize_tables(table[num_global:], old, new, valid)
    scale = (old[0] * old[1] / valid.prod(1)).to(table)
    shared = table[:num_global].expand(len(valid), -1, -1)
    return torch.cat([shared, local * scale[:, None, None]], dim=1)
