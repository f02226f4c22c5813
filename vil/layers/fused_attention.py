"""Compute the attention branch of a block in fewer passes over the tokens.

The layer norm and the projections to queries, keys and values are one operation. The output
projection and the residual connection are another.

Shapes: B batch, T tokens, C channels.
"""

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, GlobalLocalAttention
from vil.layers.attention.full import FullAttention
from vil.layers.linear import drops, has_hooks, has_plain_type, is_plain
from vil.layers.packed_linear import is_packed
from vil.layers.padding import Grid
from vil.ops.linear import Norm, linear
from vil.ops.linear_case import LINEAR, LINEAR_RESIDUAL, NORM_LINEAR, is_native

# methods that `attend_fused` replaces
FORWARDS = (FullAttention.forward, GlobalLocalAttention.forward)


def is_fused(norm: nn.Module, attn: nn.Module, x: Tensor, *, residual: bool = False) -> bool:
    """Return whether `attend_fused` should compute attn(norm(x)), plus x if `residual`.

    x: tokens (B, T, C). `can_fuse` must be true, and either the weights are packed, or the compiled
    code is selected for the projections to q, k and v or for the output projection.
    """
    if is_joined(attn):
        hooked = any(map(has_hooks, (norm, attn, *attn.children())))
        return not hooked and is_packed(attn.joined, x)
    last = LINEAR_RESIDUAL if residual else LINEAR
    native = is_native(NORM_LINEAR, x, 3 * x.shape[-1]) or is_native(last, x, x.shape[-1])
    return native and can_fuse(norm, attn)


def is_joined(attn: nn.Module) -> bool:
    """Return whether `vil.optimize_for_inference` has packed an attention's projections for the
    compiled code. Those to q, k and v are then one layer, `attn.joined`."""
    return is_packed(getattr(attn, "joined", None))


def can_fuse(norm: nn.Module, attn: nn.Module, training: bool | None = None) -> bool:
    """Return whether `attend_fused` computes the same result as a block's norm and attention.

    Returns False if one of these modules was replaced, has hooks or applies dropout to its outputs,
    if a subclass overrides `forward`, or if global tokens have separate projections. training: see
    `drops`.
    """
    if type(attn).forward not in FORWARDS or getattr(attn, "separate", False):
        return False
    drop = attn.proj_drop
    if type(norm) is not nn.LayerNorm or type(drop) not in (nn.Dropout, nn.Identity):
        return False
    if drops(drop, training) or any(map(has_hooks, (norm, attn, drop))):
        return False
    layers = [getattr(attn, name) for name in attn.projections]
    if len({layer.bias is None for layer in filter(is_plain, layers)}) != 1:
        return False  # no layer is plain, or only some have a bias
    plain = map(is_plain, (*layers, attn.proj))
    return all(map(has_plain_type, (norm.weight, norm.bias))) and all(plain)


def join_projections(attn: Attention) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights (3C, C) and biases (3C,) of the projections to q, k and v.

    The second value is None if the projections have no biases.
    """
    layers = [getattr(attn, name) for name in attn.projections]
    weight = _join([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else _join([layer.bias for layer in layers])


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def attend_fused(
    norm: nn.LayerNorm, attn: Attention, x: Tensor, grid: Grid, *, residual: bool = False
) -> Tensor:
    """Return attn(norm(x), grid) for x (B, T, C), plus x itself if `residual`."""
    packed = is_joined(attn)
    if packed:
        first, last = ((layer.packed, layer.bias) for layer in (attn.joined, attn.proj))
    else:
        first, last = join_projections(attn), (attn.proj.weight, attn.proj.bias)
    norm = Norm(norm.weight, norm.bias, norm.eps)
    out = attn.attend_qkv(linear(x, *first, norm=norm, packed=packed), grid)
    return linear(out, *last, residual=x if residual else None, packed=packed)
