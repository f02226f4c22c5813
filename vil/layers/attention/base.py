"""Base classes of the attention modules.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid rows and columns, L = X*Y local tokens, G
global tokens (which come first), T = G+L, Q queries, K keys. `valid_hw` (B, 2): rows and columns of
each image that are not padding.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vil.layers.linear import apply_linear
from vil.layers.padding import Grid, Valid, real_cells
from vil.layers.pos_embed import resize_table, square_side
from vil.ops import Case, Layout, Window
from vil.utils.train_step import TrainStep
from vil.utils.transforms import is_exporting, is_transformed

TABLE = "local_relative_position_bias_table"


class AttentionWeights(NamedTuple):
    """Softmax weights of selected queries over their keys.

    weights: (B, N, Q, G+R) for N heads and Q queries. The keys are G = num_global global tokens,
    then R local keys. The weights of a query sum to 1, unless all of its keys are masked.
    grid: (rows, columns) of the local tokens. cells: (rows, columns) of the R local keys.
    ratio: each local key stands for ratio x ratio tokens; 1 unless keys are downsampled.
    """

    weights: Tensor
    num_global: int
    grid: Grid
    cells: Grid
    ratio: int = 1


class Attention(nn.Module):
    """Base class of the attention modules. A subclass must define:

    - a constructor with the arguments of this class and, unless `has_relative_bias` is False, the
      argument `rel_pos`.
    - `forward(x, grid, valid_hw=None)`, which maps x (B, G+L, C) to the same shape. x has G global
      tokens, then L local tokens, with C = dim channels.
    - `macs(grid)`.

    All other methods and attributes are optional.

    num_global: G, the number of global tokens.
    grid: rows and columns of the local tokens, for parameters whose size depends on them.

    Raises ValueError if dim is not a multiple of num_heads.
    """

    shown: tuple[str, ...] = ("dim", "num_heads", "num_global")  # by print(model)
    has_relative_bias = True  # False: the model uses the absolute position embedding instead
    rel_pos = False  # whether a learned bias is added to the scores
    table_size: Grid | None = None  # rows and columns of the relative position table
    # names of the linear layers whose concatenated outputs are q, k and v of all tokens, in a class
    # with the method `attend_qkv`, which maps them to the input of the output projection
    projections: tuple[str, ...] = ()
    backend: str | None = None  # of `vil.ops`, for classes whose constructor takes it
    # parameters that the original 2021 code saves for this attention but never uses
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
        """Return a linear layer from C to parts * C features, such as parts=3 for q, k and v."""
        return nn.Linear(self.dim, parts * self.dim, bias=self.qkv_bias)

    def split_heads(self, x: Tensor) -> Tensor:
        """Split T tokens of C channels into N heads of D channels: (B, T, C) to (B, N, T, D)."""
        return self.split_parts(x, 1)[0]

    def split_parts(self, x: Tensor, count: int) -> list[Tensor]:
        """Split the channels of x (B, T, count*C) into `count` tensors, for example q, k and v.

        Each is a view (B, N, T, D) of x: N heads of D channels, for T tokens.
        """
        x = x.unflatten(-1, (count, self.num_heads, self.dim // self.num_heads))
        return [part.transpose(1, 2) for part in x.unbind(2)]

    def merge_heads(self, x: Tensor) -> Tensor:
        """Concatenate N heads of T tokens and D channels: (B, N, T, D) to (B, T, C = N*D)."""
        x = x.transpose(1, 2)
        if is_exporting():  # sdpa is decomposed: flatten may fail to view its output
            x = x.clone(memory_format=torch.contiguous_format)
        return x.flatten(2)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, *added: Tensor | None) -> Tensor:
        """Compute the attention output (B, N, Q, D) of Q queries, in N heads of D channels.

        q (B, N, Q, D). k, v (B, N, K, D), for K keys. added: biases and masks to add to the scores,
        or None. Dropout is applied in training mode.
        """
        dropout_p = self.attn_drop if self.training else 0.0
        parts = [x.to(q.dtype) for x in added if x is not None]
        mask = reduce(torch.add, parts) if parts else None
        if is_transformed(q, k, v):  # the fused kernels have no jvp
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=self.scale)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=self.scale)

    def global_bias(self, grid: Grid) -> Tensor:
        """Return the learned bias (N, G, G+L) of N heads and G global queries toward all keys."""
        to_local = self.g2l_relative_position_bias[0][:, :, None]
        to_local = to_local.expand(-1, -1, grid[0] * grid[1])
        return torch.cat([self.g2g_relative_position_bias, to_local], dim=-1)

    def scores(self, q: Tensor, k: Tensor, *added: Tensor | None) -> Tensor:
        """Compute the scores (B, N, Q, K), before softmax, of Q queries and K keys in N heads.

        q (B, N, Q, D), k (B, N, K, D): heads of D channels. added: biases and masks to add to the
        scores, or None. The scores are at least float32.
        """
        scores = (q * self.scale) @ k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return reduce(torch.add, [x for x in added if x is not None], scores)

    def real_tokens(self, valid_hw: Valid, grid: Grid) -> Tensor | None:
        """Return a bool mask (B, G+L) that is False for padding tokens.

        The tokens are G global, then L local ones. valid_hw (B, 2): unpadded rows and columns of
        each image. If it is None, returns None.
        """
        if valid_hw is None:
            return None
        return F.pad(real_cells(valid_hw, grid).flatten(1), (self.num_global, 0), value=True)

    def hide_padding(self, x: Tensor, valid_hw: Valid, grid: Grid) -> Tensor:
        """Return x (B, G+L, C) with padding tokens set to 0, so that NaN in them cannot spread.

        The tokens are G global, then L local ones. valid_hw (B, 2): unpadded rows and columns of
        each image. If it is None, returns x.
        """
        real = self.real_tokens(valid_hw, grid)
        return x if real is None else x.masked_fill(~real[..., None], 0.0)

    def padding_mask(self, valid_hw: Valid, grid: Grid) -> Tensor | None:
        """Return an additive float32 mask (B, 1, 1, G+L): -inf for padding keys, 0 for others.

        The keys are G global, then L local tokens. valid_hw (B, 2): unpadded rows and columns of
        each image. If it is None, returns None.
        """
        real = self.real_tokens(valid_hw, grid)
        if real is None:
            return None
        mask = torch.zeros(real.shape, dtype=torch.float32, device=real.device)
        return mask.masked_fill(~real, -torch.inf)[:, None, None]

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image, without biases and softmax.

        grid: rows and columns of the local tokens.
        """
        raise NotImplementedError

    def set_grid(self, grid: Grid, rule: str = "linear") -> None:
        """Resize the parameters that depend on the grid.

        grid: the new rows and columns of the local tokens. rule: the interpolation, a key of
        `pos_embed.RULES`.
        """

    def resize_weight(
        self, leaf: str, value: Tensor, shape: torch.Size, rule: str = "linear"
    ) -> Tensor | None:
        """Return a checkpoint's weight resized to fit a parameter; None if it cannot be resized.

        leaf, shape: name and shape of the parameter. value: the checkpoint's weight. A relative
        position table is assumed to be square. rule: the interpolation, a key of `pos_embed.RULES`.
        """
        if leaf != TABLE or value.ndim != 2 or value.shape[1:] != shape[1:]:
            return None
        old, side = square_side(len(value)), square_side(shape[0])
        new = self.table_size or (side, side)
        return resize_table(value.double(), (old, old), new, rule) if old and all(new) else None

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Update the module for the training step `progress`. The base class does nothing.

        index: position of this module among the attention modules of the model. Returns a message
        to log if the behavior of the module changes at this step, otherwise None.
        """

    def backend_cases(self, grid: Grid, *, training: bool, **call: Any) -> Iterator[Case]:
        """Yield a `Case` for each `vil.ops.local_attention` call of this module.

        A `Case` describes a call, to select a backend for it. The base class yields none.
        training: True for the calls in training and in evaluation, False for only the latter.
        call: the arguments `batch`, `dtype`, `device` and `padded` of `make_case`.
        """
        yield from ()

    def make_case(
        self, window: Window | Layout, *, training: bool, padded: bool = False, **call: Any
    ) -> Case:
        """Return the `Case` that describes a local attention call, to select a backend for it.

        window: the window or layout of the call.
        training: whether gradients are computed.
        padded: whether the call passes `valid_hw`.
        call: batch, dtype and device of the call.
        """
        return Case(
            window,
            heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            num_global=self.num_global,
            table_bias=self.rel_pos,
            global_bias=self.rel_pos and self.num_global > 0,
            valid=padded,
            dropout=training and self.attn_drop > 0,
            needs_grad=training,
            **call,
        )

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """Return the attention weights of the given queries in the call `self(x, grid, valid_hw)`.

        queries (Q,): token indices, counted with global tokens first. Dropout is not applied.
        Raises ValueError if the class cannot compute attention weights.
        """
        raise ValueError(
            f"{type(self).__name__} has no attention map, because this class does not define the "
            "method attention_weights"
        )

    @property
    def param_grid(self) -> Grid | None:
        """The grid that the parameters are sized for; None if no parameter depends on a grid."""
        return None

    @property
    def min_export_side(self) -> int:
        """Smallest grid side, in tokens, that torch.export can trace with a dynamic size.

        It is at least 2, because torch.export treats a dimension of size 1 as constant. A subclass
        may need more, such as two chunks.
        """
        return 2

    def use_2021_rule(self) -> dict[str, Any]:
        """Set arguments that are "auto" to the behavior of the original Vision Longformer code.

        Called when weights of that code are loaded. Returns {changed argument: new value}.
        """
        return {}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)


class GlobalLocalAttention(Attention):
    """Base class for attention in which global tokens attend to all tokens. A subclass implements
    the attention of local tokens in `attend_local`.

    share_weights: whether global tokens use the projections of local tokens, instead of their own.
    rel_pos: whether a learned bias is added to the scores of global queries.
    """

    shown = (*Attention.shown, "rel_pos")
    projections = ("query", "kv")

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
        """Create the linear layers for queries, for keys and values, and for outputs."""
        self.query, self.kv = self.linear(1), self.linear(2)
        self.proj = nn.Linear(self.dim, self.dim)
        if self.separate:
            self.query_global, self.kv_global = self.linear(1), self.linear(2)
            self.proj_global = nn.Linear(self.dim, self.dim)

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Apply attention to x (B, G+L, C): G global tokens, then the L local tokens of the grid.

        valid_hw (B, 2): unpadded rows and columns of each image. Returns x's shape.
        """
        x = self.hide_padding(x, valid_hw, grid)
        k, v = self.split_parts(apply_linear(self.kv, x), 2)  # (B, N, G+L, D) each
        if self.separate:
            lengths = (self.num_global, x.shape[1] - self.num_global)
            x_global, x_local = x.split(lengths, dim=1)
            q = self.split_heads(apply_linear(self.query, x_local))
            local = self.merge_heads(self.attend_local(q, k, v, grid, valid_hw))
            local = apply_linear(self.proj, local)
            q = self.split_heads(self.query_global(x_global))
            k, v = self.split_parts(apply_linear(self.kv_global, x), 2)
            first = self.merge_heads(self.attend_global(q, k, v, grid, valid_hw))
            return self.proj_drop(torch.cat([self.proj_global(first), local], dim=1))
        # project all tokens at once: projecting slices would copy them
        q = self.split_heads(apply_linear(self.query, x))
        return self.proj_drop(apply_linear(self.proj, self.attend_tokens(q, k, v, grid, valid_hw)))

    def attend_qkv(self, qkv: Tensor, grid: Grid) -> Tensor:
        """Return the attention output (B, G+L, C), before the output projection.

        qkv (B, G+L, 3C): queries, keys and values, concatenated along the channels.
        """
        return self.attend_tokens(*self.split_parts(qkv, 3), grid)

    def attend_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid = None
    ) -> Tensor:
        """Return the attention output (B, G+L, C) of q, k, v (B, N, G+L, D)."""
        q = q.split((self.num_global, q.shape[2] - self.num_global), dim=2)
        out = self.attend_all(list(q), k, v, grid, valid_hw)
        return torch.cat(out, dim=1) if self.num_global else out[0]

    def attend_all(
        self, q: list[Tensor], k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid
    ) -> list[Tensor]:
        """Return the attention outputs of global and local queries, before the output projection.

        q: G global queries (B, N, G, D) and L local queries (B, N, L, D). k, v (B, N, G+L, D).
        Returns [(B, G, C), (B, L, C)] with C = N*D channels, or only [(B, L, C)] if G is 0.
        """
        out = [self.merge_heads(self.attend_local(q[1], k, v, grid, valid_hw))]
        if self.num_global:
            out.insert(0, self.merge_heads(self.attend_global(q[0], k, v, grid, valid_hw)))
        return out

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the attention output (B, N, L, D) of local queries q (B, N, L, D).

        k, v (B, N, G+L, D): keys and values of G global tokens, then of the L local tokens. All
        have N heads of D channels.
        """
        raise NotImplementedError

    def attend_global(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the attention output (B, N, G, D) of global queries q (B, N, G, D).

        k, v (B, N, G+L, D): keys and values of G global tokens, then of the L local tokens. All
        have N heads of D channels.
        """
        bias = self.global_bias(grid)[None] if self.rel_pos else None
        return self.sdpa(q, k, v, self.padding_mask(valid_hw, grid), bias)

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """Return the attention weights of the given queries. See `Attention.attention_weights`."""
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
        """Return the attention weights (B, N, Q, T) of Q global queries over all T tokens.

        N is the number of heads. queries (Q,): indices of the queries among global tokens.
        """
        query, kv = (self.query_global, self.kv_global) if self.separate else (self.query, self.kv)
        q, k = self.split_heads(query(x[:, queries])), self.split_parts(kv(x), 2)[0]
        bias = self.global_bias(grid)[:, queries] if self.rel_pos and len(queries) else None
        return self.scores(q, k, bias, self.padding_mask(valid_hw, grid)).softmax(-1)

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """Return the attention weights (B, N, Q, T) of Q local queries over all T tokens.

        q (B, N, Q, D), k (B, N, T, D): N heads of D channels. queries (Q,): indices of the queries
        among local tokens.
        """
        raise NotImplementedError

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image, in projections and in attention."""
        tokens = self.num_global + grid[0] * grid[1]
        linears = 6 * tokens if self.separate else 4 * tokens
        attend_global = 2 * self.num_global * tokens * self.dim
        return linears * self.dim**2 + attend_global + self.local_macs(grid)

    def local_macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of `attend_local` for one image.

        Only two matmuls are counted: queries with keys, and attention weights with values.
        """
        raise NotImplementedError
