"""Our attentions with the projections of timm's: what `vil.patch_attention` puts into a model.

Letters: B images, N heads, D channels of a head, X Y grid of patches, L = X*Y patch tokens, G
prefix tokens (class, distillation, registers), which are the global ones, T = G+L.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.attention.global_only import GlobalOnlyAttention
from vil.layers.attention.longformer import LongformerAttention


class PatchGrid:
    """Rows and columns of the patch tokens in the forward pass that runs.

    A forward hook of the model's patch embedding, which every way through the model begins with
    (`forward`, `forward_features`, `forward_intermediates`), and shared by its attentions. It holds
    no tensor: copies and pickles of the model take it along, state dicts know nothing of it.

    Gradient checkpointing computes a block again, perhaps after other images have come: it finds
    the grid by the number of tokens. Two passes over turned grids (14x28, then 28x14) that wait for
    one backward would be mistaken for one another; see `GridCheck`.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.by_length = {size[0] * size[1]: size}
        self.handle: RemovableHandle | None = None

    def __call__(self, embed: nn.Module, images: tuple[Tensor], tokens: Tensor) -> None:
        """tokens (B, X, Y, C) of a model for any size of image, else (B, L, C)."""
        self.size = tuple(tokens.shape[1:3]) if tokens.ndim == 4 else tuple(embed.grid_size)
        if not torch.compiler.is_compiling():
            self.by_length[self.size[0] * self.size[1]] = self.size

    def of(self, length: int) -> tuple[int, int]:
        """(X, Y) of L patch tokens."""
        if self.size[0] * self.size[1] == length:
            return self.size
        if length not in self.by_length:
            raise ValueError(f"{length} patch tokens are no grid of {self.size[0]}x{self.size[1]}")
        return self.by_length[length]

    def __getstate__(self) -> dict:
        """For copies and pickles: sizes that torch.export left open would fit in neither."""
        if not any(isinstance(n, torch.SymInt) for n in self.size):
            return self.__dict__
        return self.__dict__ | {"size": next(iter(self.by_length.values()))}

    def attach(self, embed: nn.Module) -> None:
        if self.handle is None:
            self.handle = embed.register_forward_hook(self)

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class GridCheck(torch.autograd.Function):
    """x, for whose backward a tensor is kept that is of the grid's shape and has no numbers.

    torch compares the shapes of what a checkpointed block keeps at first and when it is computed
    again: computed again on another grid, it is an error and not a wrong gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, grid: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x.new_empty(*grid, 0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # asked for, or nothing would be compared
        return dx, None


class PatchedAttention(GlobalLocalAttention):
    """In the place of `plain`, an attention of timm's, with its modules under its names.

    The prefix tokens are the global ones. plain: Attention, AttentionRope or EvaAttention; kept
    aside, to be put back, and no submodule. Rotary embeddings turn the patch tokens, as there.
    """

    def __init__(self, plain: nn.Module, num_global: int, grid: PatchGrid, **own) -> None:
        super().__init__(
            plain.num_heads * plain.head_dim,
            plain.num_heads,
            num_global=num_global,
            attn_drop=plain.attn_drop.p,
            **own,
        )
        self.grid, self.scale, self.kept = grid, plain.scale, (plain,)
        for name in ("qkv", "q_bias", "gate"):  # that a class or a setting of timm's goes without
            if getattr(plain, name, None) is None:
                setattr(self, name, None)
        for name, part in plain.named_children():
            if name != "attn_drop":  # a number here
                self.add_module(name, part)
        for name, weight in plain.named_parameters(recurse=False):
            self.register_parameter(name, weight)
        for name, buffer in plain.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in plain._non_persistent_buffers_set)
        self.training = plain.training

    def add_projections(self, dim: int, qkv_bias: bool) -> None:
        """None: they are timm's."""

    def plain(self) -> nn.Module:
        """timm's attention, with the modules and weights of this moment."""
        (plain,) = self.kept
        for own, kept in (
            (self._modules, plain._modules),
            (self._parameters, plain._parameters),
            (self._buffers, plain._buffers),
        ):
            kept.update({name: own[name] for name in kept.keys() & own.keys()})
        plain.training = plain.attn_drop.training = self.training
        return plain

    def forward(
        self,
        x: Tensor,
        *,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """x (B, G+L, C), prefix tokens first; rope as timm's, of the L tokens -> (B, G+L, C)."""
        if attn_mask is not None or is_causal:
            raise ValueError(
                "an attention put in by patch_attention has its own mask, the window: "
                "it takes neither attn_mask nor is_causal"
            )
        lengths = [self.num_global, x.shape[1] - self.num_global]
        grid = self.grid.of(lengths[1])
        q, k, v = self.project(GridCheck.apply(x, grid))
        q_global, q_local = q.split(lengths, dim=2)
        if rope is not None:
            first, local = k.split(lengths, dim=2)
            q_local, local = self.turn(q_local, rope), self.turn(local, rope)
            k = torch.cat([first, local], dim=2)
        return self.finish(self.all_rows(q_global, q_local, k, v, grid, None), x)

    def finish(self, rows: list[Tensor], x: Tensor) -> Tensor:
        """What was attended to, (B, G, C) if G and (B, L, C), for x (B, T, C) -> (B, T, C).

        Projected apart: of rows joined before, the projection would keep a copy for backward.
        """
        rows = [self.norm(row) for row in rows]
        if self.gate is not None:
            gates = self.gate(x).sigmoid().split([row.shape[1] for row in rows], dim=1)
            rows = [row * gate for row, gate in zip(rows, gates)]
        rows = [self.proj(row) for row in rows]
        return self.proj_drop(torch.cat(rows, dim=1) if self.num_global else rows[0])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q, k, v (B, N, T, D), normalised."""
        if self.qkv is None:
            q, k, v = (self.heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        elif self.q_bias is None:
            q, k, v = self.split_parts(self.qkv(x), 3)
        else:
            bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
            q, k, v = self.split_parts(F.linear(x, self.qkv.weight, bias), 3)
        # under autocast, norms give another type than projections
        q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        if q.shape[1] > k.shape[1]:  # a key for several heads
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        return q, k, v

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, M*D) -> (B, M, T, D): keys and values may have fewer heads than queries."""
        return x.unflatten(-1, (-1, self.dim // self.num_heads)).transpose(1, 2)

    def turn(self, x: Tensor, rope: Tensor) -> Tensor:
        """x (B, N, L, D) by the rotary embedding of its places."""
        half = getattr(self.kept[0], "rotate_half", False)
        return apply_rot_embed_cat(x, rope, half=half).type_as(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in place of {type(self.kept[0]).__name__}"


class PatchedLongformer(PatchedAttention, LongformerAttention):
    """Patch tokens see their window and the prefix tokens, prefix tokens see everything."""


class PatchedGlobalOnly(PatchedAttention, GlobalOnlyAttention):
    """Patch tokens see the prefix tokens alone, prefix tokens see everything."""
