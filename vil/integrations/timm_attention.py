"""Attention modules of vil that use the projections of timm's modules, for `vil.patch_attention`.

Shapes: B batch, N heads, D head dim, C = N*D width, X Y grid of patches, L = X*Y patch tokens, G
prefix tokens (class, distillation, registers), which are the global tokens, T = G+L.
"""

import threading

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vil.layers.attention.base import AttentionWeights, GlobalLocalAttention
from vil.layers.attention.global_only import GlobalOnlyAttention
from vil.layers.attention.longformer import LongformerAttention
from vil.layers.attention.pattern import PatternAttention


class PatchGrid:
    """Rows and columns of the patch tokens in the current forward pass of each thread.

    The object is a forward hook of the model's patch embedding, shared by all attention modules of
    a model. It is copied and pickled with the model, but is not part of the state dict.

    Gradient checkpointing may recompute a block after a later forward pass on images of another
    size. The grid of the block is then looked up by the number of tokens. This number is ambiguous
    for two transposed grids (14x28 and 28x14), which `GridCheck` detects.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.last, self.local = size, threading.local()
        self.by_length = {size[0] * size[1]: size}
        self.handle: RemovableHandle | None = None

    @property
    def size(self) -> tuple[int, int]:
        """The grid (rows, columns) of the last forward pass in this thread.

        If this thread has run no forward pass, it is the grid of the last forward pass in any
        thread. Autograd may recompute a block in such a thread.
        """
        return getattr(self.local, "size", self.last)

    def __call__(self, embed: nn.Module, images: tuple[Tensor], tokens: Tensor) -> None:
        """Record the patch grid of a forward pass, as a forward hook of the patch embedding.

        tokens: the output of `embed`. If it is (B, X, Y, C), the grid is X x Y, otherwise the fixed
        `embed.grid_size`.
        """
        size = tuple(tokens.shape[1:3]) if tokens.ndim == 4 else tuple(embed.grid_size)
        self.last = self.local.size = size
        if not torch.compiler.is_compiling():
            self.by_length[size[0] * size[1]] = size

    def find(self, length: int) -> tuple[int, int]:
        """Return the grid (rows, columns) of `length` patch tokens.

        Raises ValueError if no forward pass had that many patch tokens.
        """
        size = self.size
        if size[0] * size[1] == length:
            return size
        if length not in self.by_length:
            raise ValueError(
                f"{length} patch tokens do not form a grid of {size[0]}x{size[1]}, the "
                "output size of the patch embedding: the model must not add or drop patch tokens"
            )
        return self.by_length[length]

    def __getstate__(self) -> dict:
        """Return the attributes to pickle, without the grids of other threads.

        Symbolic dimensions of torch.export cannot be pickled. A grid that has them is replaced by
        the first recorded grid.
        """
        size = self.size
        if any(isinstance(n, torch.SymInt) for n in size):
            size = next(iter(self.by_length.values()))
        return {"size": size, "by_length": self.by_length, "handle": self.handle}

    def __setstate__(self, state: dict) -> None:
        self.last, self.local = state["size"], threading.local()
        self.by_length, self.handle = state["by_length"], state["handle"]

    def attach(self, embed: nn.Module) -> None:
        """Register this object as a forward hook of the patch embedding."""
        if self.handle is None:
            self.handle = embed.register_forward_hook(self)

    def detach(self) -> None:
        """Remove the forward hook."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class GridCheck(torch.autograd.Function):
    """Identity function that makes torch raise an error if gradient checkpointing recomputes a
    block on a different grid than in the forward pass. Without this error, the gradient would be
    wrong."""

    @staticmethod
    def forward(ctx, x: Tensor, grid: tuple[int, int]) -> Tensor:
        # torch checks that saved tensors have the same shapes in the recomputation
        ctx.save_for_backward(x.new_empty(*grid, 0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # torch compares shapes on access only
        return dx, None


class PatchedAttention(GlobalLocalAttention):
    """Replacement for an attention module of timm, with the same submodules under the same names.

    Rotary embeddings apply to patch tokens only, as in timm.

    plain: the Attention, AttentionRope or EvaAttention of timm to replace.
    num_global: number of prefix tokens, which become global tokens.
    grid: patch grid, shared by all attention modules of a model.
    kwargs: arguments of vil's attention class.
    """

    def __init__(self, plain: nn.Module, num_global: int, grid: PatchGrid, **kwargs) -> None:
        super().__init__(
            plain.num_heads * plain.head_dim,
            plain.num_heads,
            num_global=num_global,
            attn_drop=plain.attn_drop.p,
            **kwargs,
        )
        # a tuple, so that timm's module, which `restore` returns, is not a submodule
        self.grid, self.scale, self.kept = grid, plain.scale, (plain,)
        for name in ("qkv", "q_bias", "gate"):  # missing in some classes and settings of timm
            if getattr(plain, name, None) is None:
                setattr(self, name, None)
        for name, part in plain.named_children():
            if name != "attn_drop":  # this class stores its rate instead
                self.add_module(name, part)
        for name, weight in plain.named_parameters(recurse=False):
            self.register_parameter(name, weight)
        for name, buffer in plain.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in plain._non_persistent_buffers_set)
        self.training = plain.training

    def add_projections(self) -> None:
        """Do nothing, because this module uses timm's projections."""

    def attention_weights(self, *args, **kwargs) -> AttentionWeights:
        """Raise ValueError, because attention maps are not supported with timm's projections."""
        raise ValueError(
            f"{type(self).__name__} has no attention map: attention maps are not supported in "
            "patched timm models"
        )

    def restore(self) -> nn.Module:
        """Return the timm attention that this module replaced, with the current weights."""
        (plain,) = self.kept
        for group in ("_modules", "_parameters", "_buffers"):
            current, kept = getattr(self, group), getattr(plain, group)
            kept.update({name: current[name] for name in kept.keys() & current.keys()})
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
        """Apply attention to x (B, G+L, C): G prefix tokens, then L patch tokens.

        rope: the rotary embedding of the L patch tokens, in timm's format. Returns (B, G+L, C).
        Raises ValueError if attn_mask or is_causal is set.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                "patched attention supports neither attn_mask nor is_causal: its window or pattern "
                "already determines which keys a query attends to. To use these arguments, restore "
                "timm's attention with vil.patch_attention(model, 'full')"
            )
        lengths = [self.num_global, x.shape[1] - self.num_global]
        grid = self.grid.find(lengths[1])
        q, k, v = self.project_qkv(GridCheck.apply(x, grid))
        q_global, q_local = q.split(lengths, dim=2)
        if rope is not None:
            first, local = k.split(lengths, dim=2)
            q_local, local = self.rotate(q_local, rope), self.rotate(local, rope)
            k = torch.cat([first, local], dim=2)
        return self.project_out(self.attend_all([q_global, q_local], k, v, grid, None), x)

    def project_out(self, outputs: list[Tensor], x: Tensor) -> Tensor:
        """Normalize, gate and project attention outputs, then concatenate them to (B, G+L, C).

        outputs: if G > 0, the outputs of the G prefix tokens (B, G, C); then the outputs of the L
          patch tokens (B, L, C).
        x: the input of the attention (B, G+L, C), from which the gates are computed.
        """
        outputs = [self.norm(out) for out in outputs]
        if self.gate is not None:
            gates = self.gate(x).sigmoid().split([out.shape[1] for out in outputs], dim=1)
            outputs = [out * gate for out, gate in zip(outputs, gates)]
        outputs = [self.proj(out) for out in outputs]
        # if concatenated before, autograd would save another copy of the outputs
        return self.proj_drop(torch.cat(outputs, dim=1) if self.num_global else outputs[0])

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, C) to q, k, v, and normalize q and k.

        Each of q, k, v is (B, N, T, D): N heads of D channels, for T tokens.
        """
        if self.qkv is None:
            projected = (linear(x) for linear in (self.q_proj, self.k_proj, self.v_proj))
            # (B, T, M*D) -> (B, M, T, D): keys and values may have M < N heads
            sizes = (-1, self.dim // self.num_heads)
            q, k, v = (part.unflatten(-1, sizes).transpose(1, 2) for part in projected)
        elif self.q_bias is None:
            q, k, v = self.split_parts(self.qkv(x), 3)
        else:
            bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
            q, k, v = self.split_parts(F.linear(x, self.qkv.weight, bias), 3)
        # under autocast, norms return another dtype than projections
        q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        if q.shape[1] > k.shape[1]:  # grouped-query attention
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        return q, k, v

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Apply the rotary embedding `rope`, in timm's format, to x (B, N, L, D).

        x: queries or keys of L patch tokens, in N heads of D channels.
        """
        half = getattr(self.kept[0], "rotate_half", False)
        return apply_rot_embed_cat(x, rope, half=half).type_as(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in place of {type(self.kept[0]).__name__}"


class PatchedLongformer(PatchedAttention, LongformerAttention):
    """Replacement for timm's attention in which a patch token attends to a 2-D window.

    Patch tokens also attend to the prefix tokens. Prefix tokens attend to all tokens.
    """


class PatchedPattern(PatchedAttention, PatternAttention):
    """Replacement for timm's attention in which a patch token attends to a 2-D pattern.

    Patch tokens also attend to the prefix tokens. Prefix tokens attend to all tokens. Raises
    ValueError if the pattern is not defined on the model's grid.
    """

    def __init__(self, plain: nn.Module, num_global: int, grid: PatchGrid, **kwargs) -> None:
        super().__init__(plain, num_global, grid, **kwargs)
        self.window(grid.size)


class PatchedGlobalOnly(PatchedAttention, GlobalOnlyAttention):
    """Replacement for timm's attention in which patch tokens attend to prefix tokens only.

    Prefix tokens attend to all tokens.
    """
