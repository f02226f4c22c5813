"""What the attention modules share: heads, masks of padding, and the rows of global tokens.

Letters: B images, N heads, D channels of a head, C = N*D, X Y grid, L = X*Y local tokens, G global
tokens, T = G+L.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.padding import real_cells
from vil.utils.train_step import TrainStep


class Attention(nn.Module):
    """Base of attention modules: `forward(x (B, G+L, C), grid, valid=None) -> (B, G+L, C)`.

    has_relative_bias: whether the class takes `rel_pos`; the others need the absolute embedding.
    Raises ValueError if the heads do not divide the width.
    """

    has_relative_bias = True

    def __init__(
        self, dim: int, num_heads: int, num_global: int, attn_drop: float, proj_drop: float
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide the width {dim}")
        self.dim, self.num_heads, self.num_global = dim, num_heads, num_global
        self.scale = (dim // num_heads) ** -0.5
        self.attn_drop = attn_drop
        self.proj_drop = nn.Dropout(proj_drop)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, N, T, D)."""
        return self.split_parts(x, 1)[0]

    def split_parts(self, x: Tensor, parts: int) -> list[Tensor]:
        """(B, T, M*C) -> M tensors (B, N, T, D): views, whose gradients are laid together once."""
        found = x.unflatten(-1, (parts, self.num_heads, self.dim // self.num_heads))
        return [part.transpose(1, 2) for part in found.unbind(2)]

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, N, T, D) -> (B, T, C)."""
        return x.transpose(1, 2).flatten(2)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q (B, N, Q, D), k, v (B, N, K, D), mask added to the scores -> (B, N, Q, D)."""
        drop = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, drop, scale=self.scale)

    def macs(self, grid: tuple[int, int]) -> int:
        """Multiply-accumulates of one image, biases and softmax not counted."""
        raise NotImplementedError

    def set_grid(self, grid: tuple[int, int], rule: str = "linear") -> None:
        """Make parameters that depend on the grid, if any, for another one, for good."""

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Take note of the step, as module `index`; returns a line if something changed."""

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, num_global={self.num_global}"


def real_tokens(valid: Tensor, grid: tuple[int, int], num_global: int) -> Tensor:
    """valid (B, 2) -> (B, G+L) bool: global tokens and those within the valid rows and columns."""
    return F.pad(real_cells(valid, grid).flatten(1), (num_global, 0), value=True)


def padding_mask(
    valid: Tensor, grid: tuple[int, int], num_global: int, dtype: torch.dtype
) -> Tensor:
    """valid (B, 2) -> (B, 1, 1, G+L): 0 for real keys and globals, -inf for padding."""
    real = real_tokens(valid, grid, num_global)
    mask = torch.zeros(real.shape, dtype=dtype, device=valid.device).masked_fill(~real, -torch.inf)
    return mask[:, None, None]


class GlobalLocalAttention(Attention):
    """Global tokens attend to everything; how local tokens attend is said by `local_rows`.

    share_weights: global tokens use the projections of local tokens; else they have query_global,
    kv_global and proj_global. The relative bias of global rows comes with rel_pos.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_global: int = 1,
        rel_pos: bool = False,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        share_weights: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, num_global, attn_drop, proj_drop)
        self.rel_pos = rel_pos
        self.separate = num_global > 0 and not share_weights
        self.add_projections(dim, qkv_bias)

    def add_projections(self, dim: int, qkv_bias: bool) -> None:
        """What makes queries, keys and values of tokens, and tokens of what was attended to."""
        self.query = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        if self.separate:
            self.query_global = nn.Linear(dim, dim, bias=qkv_bias)
            self.kv_global = nn.Linear(dim, 2 * dim, bias=qkv_bias)
            self.proj_global = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """x (B, G+L, C), global tokens first; valid (B, 2) real rows and columns -> (B, G+L, C)."""
        lengths = (self.num_global, x.shape[1] - self.num_global)
        k, v = self.split_parts(self.kv(x), 2)  # (B, N, G+L, D) each
        if self.separate:
            x_global, x_local = x.split(lengths, dim=1)
            q = self.split_heads(self.query(x_local))
            rows = self.proj(self.merge_heads(self.local_rows(q, k, v, grid, valid)))
            q = self.split_heads(self.query_global(x_global))
            k, v = self.split_parts(self.kv_global(x), 2)
            first = self.proj_global(self.merge_heads(self.global_rows(q, k, v, grid, valid)))
            return self.proj_drop(torch.cat([first, rows], dim=1))
        # One projection for all tokens: a slice of them would have to be copied before it.
        q_global, q_local = map(self.split_heads, self.query(x).split(lengths, dim=1))
        rows = self.all_rows(q_global, q_local, k, v, grid, valid)
        rows = torch.cat(rows, dim=1) if self.num_global else rows[0]
        return self.proj_drop(self.proj(rows))

    def all_rows(
        self,
        q_global: Tensor,
        q_local: Tensor,
        k: Tensor,
        v: Tensor,
        grid: tuple[int, int],
        valid: Tensor | None,
    ) -> list[Tensor]:
        """q (B, N, G, D) and (B, N, L, D), k, v (B, N, G+L, D) -> (B, G, C) if G, and (B, L, C)."""
        rows = [self.merge_heads(self.local_rows(q_local, k, v, grid, valid))]
        if self.num_global:
            rows.insert(0, self.merge_heads(self.global_rows(q_global, k, v, grid, valid)))
        return rows

    def local_rows(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> Tensor:
        """q (B, N, L, D), k, v (B, N, G+L, D) -> (B, N, L, D)."""
        raise NotImplementedError

    def global_rows(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> Tensor:
        """q (B, N, G, D), k, v (B, N, G+L, D) -> (B, N, G, D): plain attention to all tokens."""
        mask = None if valid is None else padding_mask(valid, grid, self.num_global, q.dtype)
        if self.rel_pos:
            to_local = self.g2l_relative_position_bias[0][:, :, None].expand(
                -1, -1, grid[0] * grid[1]
            )
            bias = torch.cat([self.g2g_relative_position_bias, to_local], dim=-1)[None].to(q.dtype)
            mask = bias if mask is None else mask + bias
        return self.dense(q, k, v, mask)

    def macs(self, grid: tuple[int, int]) -> int:
        """The four projections of all tokens, the global rows and the local rows."""
        tokens = self.num_global + grid[0] * grid[1]
        linears = 4 * tokens  # q, k, v and proj, then perhaps k and v of the global rows
        linears += 2 * tokens if self.separate else 0
        return (
            linears * self.dim**2 + 2 * self.num_global * tokens * self.dim + self.local_macs(grid)
        )

    def local_macs(self, grid: tuple[int, int]) -> int:
        """Those of `local_rows`: scores and values."""
        raise NotImplementedError
