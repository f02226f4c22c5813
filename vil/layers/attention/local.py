"""Base class of attention in which each local token attends to some of the local tokens.

Shapes: B batch, N heads, D head dim, L local tokens, G global tokens, T = G+L, Q queries, K keys.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.attention.overrides import overrides
from vil.layers.padding import Grid, Valid
from vil.ops import BACKENDS, Layout, LocalBias, Window, choose, local_attention
from vil.ops.bias import NO_BIAS
from vil.ops.qkv_attention import NATIVE, attend_qkv
from vil.utils.lookup import lookup
from vil.utils.transforms import is_exporting, is_transformed

REPLACED = (  # the methods that `attend_qkv` replaces
    "attend_tokens", "attend_all", "attend_local", "attend_global", "attend", "sdpa", "split_parts",
    "split_heads", "merge_heads", "global_bias", "padding_mask",
)  # fmt: skip


class AttendedKeys(NamedTuple):
    """The local tokens that one query may attend to.

    keys (K,): indices of local tokens; a token may occur several times.
    entries (K,): index of each key's bias in the relative position bias table.
    visible (N, K) or (1, K) bool: whether the query attends to the key, for each head or for all.
    """

    keys: Tensor
    entries: Tensor
    visible: Tensor


class LocalAttention(GlobalLocalAttention):
    """Attention of local tokens to the global tokens and to a window or pattern of local tokens.

    A subclass defines `window`, `attended` and `local_macs`. It also registers the relative
    position bias if `rel_pos` is True. backend: "auto" or a name in `vil.ops.BACKENDS`.
    """

    def __init__(self, dim: int, num_heads: int, *, backend: str = "auto", **common: Any) -> None:
        super().__init__(dim, num_heads, **common)
        if backend != "auto":
            lookup(BACKENDS, backend, "backend")
        self.backend = backend

    def window(self, grid: Grid) -> Window | Layout:
        """Return the `Window` or `Layout` that defines the local keys of each query on a grid."""
        raise NotImplementedError

    def attended(self, grid: Grid, query: int) -> AttendedKeys:
        """Return the local keys of one local query. query: its index among the local tokens."""
        raise NotImplementedError

    def attend_qkv(self, qkv: Tensor, grid: Grid) -> Tensor:
        """Return the attention output (B, G+L, C), before the output projection.

        qkv (B, G+L, 3C): queries, keys and values, concatenated along the channels. If the backend
        is "native", a single operation computes the attention of local and of global queries.
        """
        window = self.window(grid)
        if not self.is_native(qkv, window):
            return super().attend_qkv(qkv, grid)
        from_globals = None
        if self.rel_pos and self.num_global:
            to_local = self.g2l_relative_position_bias[0][..., None]
            from_globals = torch.cat([self.g2g_relative_position_bias, to_local], dim=-1)
        return attend_qkv(
            qkv,
            window,
            num_heads=self.num_heads,
            num_global=self.num_global,
            bias=self.bias(grid) or NO_BIAS,
            from_globals=from_globals,
            scale=self.scale,
        )

    def is_native(self, qkv: Tensor, window: Window | Layout) -> bool:
        """Return whether `vil.ops.qkv_attention` should compute a call of `attend_qkv`.

        This requires that the backend is "native", that `vil.ops.qkv_attention` supports the call,
        and that the user has not overridden any method listed in REPLACED.
        """
        if torch.compiler.is_compiling() or is_exporting() or overrides(self, REPLACED):
            return False
        drops = self.training and self.attn_drop > 0
        if drops or not qkv.is_cpu or qkv.shape[0] == 0:
            return False
        if qkv.shape[1] != self.num_global + window.length:
            return False
        if is_transformed(qkv, *self._parameters.values()):
            return False
        call = dict(batch=qkv.shape[0], dtype=qkv.dtype, device="cpu")
        case = self.make_case(window, training=torch.is_grad_enabled(), **call)
        case = replace(case, dropout=False) if case.dropout else case
        return choose(case, self.backend) == NATIVE

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the attention output (B, N, L, D) of local queries q (B, N, L, D).

        k, v (B, N, G+L, D): keys and values of G global tokens, then of the L local tokens.
        """
        return self.attend(q, k, v, self.window(grid), self.bias(grid), valid_hw)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window | Layout,
        bias: LocalBias | None,
        valid_hw: Valid,
        neighbor: Tensor | None = None,
    ) -> Tensor:
        """Call `vil.ops.local_attention` with the settings of this module.

        q (B, N, L, D), k, v (B, N, G+L, D), with global tokens first. Returns (B, N, L, D).
        """
        return local_attention(
            q,
            k,
            v,
            window,
            num_global=self.num_global,
            bias=bias,
            valid_hw=valid_hw,
            scale=self.scale,
            dropout_p=self.attn_drop if self.training else 0.0,
            backend=self.backend,
            neighbor=neighbor,
        )

    def bias(self, grid: Grid) -> LocalBias | None:
        """Return the learned bias of local queries for a grid; None if `rel_pos` is False."""
        if not self.rel_pos:
            return None
        to_global = self.g2l_relative_position_bias[1] if self.num_global else None
        return LocalBias(self.bias_table(grid).mT, to_global)

    def bias_table(self, grid: Grid) -> Tensor:
        """Return the relative position bias table for a grid: (entries, N) for N heads."""
        return self.local_relative_position_bias_table

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """Return the attention weights (B, N, Q, T) of local queries over all T tokens.

        q (B, N, Q, D), k (B, N, T, D). queries (Q,): indices of the queries among local tokens.
        """
        return self.weights_under(self.bias(grid), q, k, grid, queries, valid_hw)

    def weights_under(
        self,
        bias: LocalBias | None,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        queries: Tensor,
        valid_hw: Valid,
    ) -> Tensor:
        """Return the attention weights (B, N, Q, T) of local queries with a given bias.

        bias: the bias to add to the scores; None for no bias. The other arguments are the same as
        in `local_weights`.
        """
        scores = self.scores(q, k)
        rows = [
            self._weights_of_query(scores[:, :, at], grid, query, bias, valid_hw)
            for at, query in enumerate(queries.tolist())
        ]
        return torch.stack(rows, dim=2) if rows else scores

    def _weights_of_query(
        self, scores: Tensor, grid: Grid, query: int, bias: LocalBias | None, valid_hw: Valid
    ) -> Tensor:
        """Return the attention weights (B, N, T) of one local query for all T tokens.

        scores (B, N, T): the query's scores, without `bias`. query: its index among local tokens. A
        key that the window contains several times gets the sum of its weights.
        """
        num_global, device = self.num_global, scores.device
        local, entries, visible = (x.to(device) for x in self.attended(grid, query))
        keys = torch.cat([torch.arange(num_global, device=device), num_global + local])
        scores = scores[:, :, keys]
        if bias is not None:
            parts = [bias.table[:, entries]]
            if bias.to_global is not None:
                parts.insert(0, bias.to_global)
            scores = scores + torch.cat(parts, dim=-1)
        visible = torch.cat([visible.new_ones(len(visible), num_global), visible], dim=1)
        if valid_hw is not None:
            visible = visible & self.real_tokens(valid_hw, grid)[:, keys][:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        full = weights.new_zeros(*weights.shape[:2], num_global + grid[0] * grid[1])
        return full.index_add(2, keys, weights)
