"""The base classes of the attention modules.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid rows and columns, L = X*Y local tokens, G
global tokens, T = G+L, Q queried tokens. `valid_hw` (B, 2) counts the rows and columns of each
image that are not padding.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.padding import Grid, Valid, real_cells
from vil.layers.pos_embed import resize_table, square_side
from vil.ops import Case
from vil.utils.train_step import TrainStep

TABLE = "local_relative_position_bias_table"


class AttentionWeights(NamedTuple):
    """The softmax weights of some tokens.

    weights (B, N, Q, G+R): each row sums to 1, a hidden key has exactly 0.
    grid: rows and columns of the tokens. cells: rows and columns of the R keys after the global
    ones, the grid itself unless keys stand for `ratio` x `ratio` tokens each.
    """

    weights: Tensor
    num_global: int
    grid: Grid
    cells: Grid
    ratio: int = 1


class Attention(nn.Module):
    """Base of the attention modules. A subclass defines

    - a constructor with the arguments of this class, and rel_pos unless `has_relative_bias` is
      False; those that it does not need itself may be passed on as **kwargs,
    - `forward(x (B, G+L, C), grid, valid_hw=None) -> (B, G+L, C)`, global tokens first,
    - `macs(grid)`.

    The other attributes and methods have defaults for a class without the feature.
    Raises ValueError if num_heads does not divide dim.
    """

    shown: tuple[str, ...] = ("dim", "num_heads", "num_global")  # by print(model)
    has_relative_bias = True  # False: the model uses the absolute position embedding instead
    backend: str | None = None  # of `vil.ops`, for classes that use local attention
    # entries that the attention has in files of the 2021 reference, and that nothing reads
    unused_2021: tuple[str, ...] = ()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_global: int = 1,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        grid: Grid | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide dim {dim}")
        self.dim, self.num_heads, self.num_global = dim, num_heads, num_global
        self.scale = (dim // num_heads) ** -0.5
        self.attn_drop, self.grid, self.qkv_bias = attn_drop, grid, qkv_bias
        self.proj_drop = nn.Dropout(proj_drop)

    def linear(self, parts: int) -> nn.Linear:
        """A projection of C to parts*C: `parts` of queries, keys and values."""
        return nn.Linear(self.dim, parts * self.dim, bias=self.qkv_bias)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, N, T, D)."""
        return self.split_parts(x, 1)[0]

    def split_parts(self, x: Tensor, count: int) -> list[Tensor]:
        """(B, T, count*C) -> `count` views (B, N, T, D), whose gradients are concatenated once."""
        x = x.unflatten(-1, (count, self.num_heads, self.dim // self.num_heads))
        return [part.transpose(1, 2) for part in x.unbind(2)]

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, N, T, D) -> (B, T, C)."""
        return x.transpose(1, 2).flatten(2)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, *added: Tensor | None) -> Tensor:
        """q (B, N, Q, D), k, v (B, N, K, D), biases and masks of the scores -> (B, N, Q, D)."""
        dropout_p = self.attn_drop if self.training else 0.0
        parts = [x.to(q.dtype) for x in added if x is not None]
        mask = reduce(torch.add, parts) if parts else None
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=self.scale)

    def scores(self, q: Tensor, k: Tensor, *added: Tensor | None) -> Tensor:
        """q (B, N, Q, D), k (B, N, K, D), biases and masks -> (B, N, Q, K), float32 at least."""
        scores = (q * self.scale) @ k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return reduce(torch.add, [x for x in added if x is not None], scores)

    def real_tokens(self, valid_hw: Valid, grid: Grid) -> Tensor | None:
        """(B, G+L) bool: global tokens, and local tokens that are not padding."""
        if valid_hw is None:
            return None
        return F.pad(real_cells(valid_hw, grid).flatten(1), (self.num_global, 0), value=True)

    def padding_mask(self, valid_hw: Valid, grid: Grid, dtype: torch.dtype) -> Tensor | None:
        """(B, 1, 1, G+L): 0 for global and real keys, -inf for padding."""
        real = self.real_tokens(valid_hw, grid)
        if real is None:
            return None
        mask = torch.zeros(real.shape, dtype=dtype, device=real.device)
        return mask.masked_fill(~real, -torch.inf)[:, None, None]

    def macs(self, grid: Grid) -> int:
        """Multiply-accumulates of one image, without biases and softmax."""
        raise NotImplementedError

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the parameters that depend on the grid, by one of `pos_embed.RULES`."""

    def resize_weight(
        self, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
    ) -> Tensor | None:
        """Resize a weight of a checkpoint for the parameter `leaf`; None if it cannot be resized.

        Relative position tables of checkpoints are taken as square.
        """
        if leaf != TABLE or value.ndim != 2 or value.shape[1:] != shape[1:]:
            return None
        old, new = square_side(len(value)), self.table_shape(shape[0])
        return resize_table(value.double(), (old, old), new, rule) if old and new else None

    def table_shape(self, entries: int) -> Grid | None:
        """Rows and columns of the relative position table of so many entries."""
        side = square_side(entries)
        return (side, side) if side else None

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Store the training step for module number `index`. Returns a log line on a change."""

    def backend_cases(self, grid: Grid, *, training: bool, **call: Any) -> Iterator[Case]:
        """The calls of local attention on this grid: in training, if `training`, and evaluation.

        call: batch, dtype, device and padded, see `LongformerAttention.case`.
        """
        yield from ()

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """The weights of tokens `queries` (Q,) in `self(x, grid, valid_hw)`, without dropout.

        Raises ValueError if there are none.
        """
        raise ValueError(f"{type(self).__name__} has no map: it does not define one")

    @property
    def param_grid(self) -> Grid | None:
        """The grid that the size of parameters depends on, None if it depends on none."""
        return None

    @property
    def min_export_side(self) -> int:
        """The least side of a grid to trace for export with open sizes.

        torch specializes on dimensions of size 1, such as a single chunk.
        """
        return 2

    def changed_since_2021(self) -> str | None:
        """Describe how results differ from those of the 2021 code; None if they do not."""
        return None

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)


class GlobalLocalAttention(Attention):
    """Global tokens attend to all tokens, local tokens as `attend_local` defines.

    share_weights: global tokens use the projections of local tokens. If False they have their own:
    query_global, kv_global and proj_global. rel_pos: global queries have a learned bias.
    """

    shown = (*Attention.shown, "rel_pos")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rel_pos: bool = False,
        share_weights: bool = True,
        **common,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        self.rel_pos = rel_pos
        self.separate = self.num_global > 0 and not share_weights
        self.add_projections()

    def add_projections(self) -> None:
        """Create the input and output projections."""
        self.query, self.kv = self.linear(1), self.linear(2)
        self.proj = nn.Linear(self.dim, self.dim)
        if self.separate:
            self.query_global, self.kv_global = self.linear(1), self.linear(2)
            self.proj_global = nn.Linear(self.dim, self.dim)

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """x (B, G+L, C), global tokens first -> (B, G+L, C)."""
        lengths = (self.num_global, x.shape[1] - self.num_global)
        k, v = self.split_parts(self.kv(x), 2)  # (B, N, G+L, D) each
        if self.separate:
            x_global, x_local = x.split(lengths, dim=1)
            q = self.split_heads(self.query(x_local))
            local = self.proj(self.merge_heads(self.attend_local(q, k, v, grid, valid_hw)))
            q = self.split_heads(self.query_global(x_global))
            k, v = self.split_parts(self.kv_global(x), 2)
            first = self.merge_heads(self.attend_global(q, k, v, grid, valid_hw))
            return self.proj_drop(torch.cat([self.proj_global(first), local], dim=1))
        # one projection of all tokens: a slice of them would be copied for it
        q = [self.split_heads(part) for part in self.query(x).split(lengths, dim=1)]
        out = self.attend_all(q, k, v, grid, valid_hw)
        out = torch.cat(out, dim=1) if self.num_global else out[0]
        return self.proj_drop(self.proj(out))

    def attend_all(
        self, q: list[Tensor], k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid
    ) -> list[Tensor]:
        """q (B, N, G, D) and (B, N, L, D), k, v (B, N, G+L, D) -> [(B, G, C) if G, (B, L, C)]."""
        out = [self.merge_heads(self.attend_local(q[1], k, v, grid, valid_hw))]
        if self.num_global:
            out.insert(0, self.merge_heads(self.attend_global(q[0], k, v, grid, valid_hw)))
        return out

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """q (B, N, L, D), k, v (B, N, G+L, D) -> (B, N, L, D)."""
        raise NotImplementedError

    def attend_global(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """q (B, N, G, D), k, v (B, N, G+L, D) -> (B, N, G, D): full attention to all tokens."""
        bias = self.global_bias(grid)[None] if self.rel_pos else None
        return self.sdpa(q, k, v, self.padding_mask(valid_hw, grid, q.dtype), bias)

    def global_bias(self, grid: Grid) -> Tensor:
        """(N, G, G+L): the learned bias of global queries."""
        to_local = self.g2l_relative_position_bias[0][:, :, None]
        to_local = to_local.expand(-1, -1, grid[0] * grid[1])
        return torch.cat([self.g2g_relative_position_bias, to_local], dim=-1)

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """See `Attention.attention_weights`."""
        is_global = queries < self.num_global
        dtype = torch.promote_types(x.dtype, torch.float32)
        weights = x.new_zeros(len(x), self.num_heads, len(queries), x.shape[1], dtype=dtype)
        weights[:, :, is_global] = self._global_weights(x, grid, queries[is_global], valid_hw)
        local = queries[~is_global]
        q = self.split_heads(self.query(x[:, local]))
        k = self.split_parts(self.kv(x), 2)[0]
        weights[:, :, ~is_global] = self.local_weights(
            q, k, grid, local - self.num_global, valid_hw
        )
        return AttentionWeights(weights, self.num_global, grid, grid)

    def _global_weights(self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid) -> Tensor:
        """(B, N, Q, T) of global tokens."""
        query, kv = (self.query_global, self.kv_global) if self.separate else (self.query, self.kv)
        q, k = self.split_heads(query(x[:, queries])), self.split_parts(kv(x), 2)[0]
        bias = self.global_bias(grid)[:, queries] if self.rel_pos and len(queries) else None
        mask = self.padding_mask(valid_hw, grid, torch.promote_types(q.dtype, torch.float32))
        return self.scores(q, k, bias, mask).softmax(-1)

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """q (B, N, Q, D) of local tokens `queries`, k (B, N, T, D) -> weights (B, N, Q, T)."""
        raise NotImplementedError

    def macs(self, grid: Grid) -> int:
        """The projections of all tokens, global attention and local attention."""
        tokens = self.num_global + grid[0] * grid[1]
        linears = 6 * tokens if self.separate else 4 * tokens
        attend_global = 2 * self.num_global * tokens * self.dim
        return linears * self.dim**2 + attend_global + self.local_macs(grid)

    def local_macs(self, grid: Grid) -> int:
        """Multiply-accumulates of the scores and values in `attend_local`."""
        raise NotImplementedError
