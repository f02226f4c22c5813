"""The attention branch of a block with fewer passes over the tokens.

The layer norm is computed together with the projections to queries, keys and values, and the
residual connection together with the output projection (`vil.ops.linear`).

Shapes: B batch, T tokens, C channels, O outputs.
"""

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, GlobalLocalAttention
from vil.layers.attention.full import FullAttention
from vil.layers.linear import has_hooks, has_plain_type, is_plain
from vil.layers.padding import Grid
from vil.ops.linear import Norm, kind_of, linear
from vil.ops.linear_case import is_native

NORM_LINEAR = kind_of(norm=True, residual=None)
FORWARDS = (FullAttention.forward, GlobalLocalAttention.forward)  # that `attend_fused` replaces


def is_fused(norm: nn.Module, attn: Attention, x: Tensor) -> bool:
    """Whether to compute attn(norm(x)) by `attend_fused`, for x (B, T, C).

    It is used where tuning found compiled code faster for the projections, if `can_fuse`.
    """
    return is_native(NORM_LINEAR, x, 3 * x.shape[-1]) and can_fuse(norm, attn)


def can_fuse(norm: nn.Module, attn: nn.Module) -> bool:
    """Whether `attend_fused` computes what a block's modules compute.

    It does not if a module was replaced, has hooks or drops outputs, or if a subclass overrides
    `forward`.
    """
    if type(attn).forward not in FORWARDS or getattr(attn, "separate", False):
        return False
    drops = attn.proj_drop.p > 0 and attn.training
    if type(norm) is not nn.LayerNorm or drops or any(map(has_hooks, (norm, attn, attn.proj_drop))):
        return False
    layers = [*projections(attn), attn.proj]
    return all(map(has_plain_type, (norm.weight, norm.bias))) and all(map(is_plain, layers))


def projections(attn: Attention) -> list[nn.Linear]:
    """Return the linear layers whose concatenated outputs are queries, keys and values."""
    return [getattr(attn, name) for name in attn.projections]


def attend_fused(
    norm: nn.LayerNorm, attn: Attention, x: Tensor, grid: Grid, *, residual: bool = False
) -> Tensor:
    """Return attn(norm(x), grid) for x (B, T, C), plus x itself if `residual`."""
    layers = projections(attn)
    weight = _join([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else _join([layer.bias for layer in layers])
    qkv = linear(x, weight, bias, norm=Norm(norm.weight, norm.bias, norm.eps))
    out = attn.attend_tokens(*attn.split_parts(qkv, 3), grid)
    return linear(out, attn.proj.weight, attn.proj.bias, residual=x if residual else None)


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
