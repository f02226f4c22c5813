"""Compute a block without gradients in one call of the compiled code, `vil.ops.block`.

Shapes: B batch, T tokens, C channels.
"""

import torch
from torch import Tensor, nn

from vil.layers.attention.full import FullAttention, one_chunk
from vil.layers.attention.local import LocalAttention
from vil.layers.attention.overrides import overrides
from vil.layers.fused_attention import is_fused, is_joined, join_projections
from vil.layers.fused_mlp import mlp_weights
from vil.layers.packed_linear import is_packed
from vil.layers.padding import Grid
from vil.ops.block import BlockWeights, block
from vil.ops.linear_case import LINEAR_RESIDUAL, MLP, NORM_LINEAR, compute_dtype, is_native
from vil.ops.operator_call import is_watched
from vil.utils.transforms import is_transformed


def fused_block(
    norm1: nn.Module, attn: nn.Module, norm2: nn.Module, mlp: nn.Module, x: Tensor, grid: Grid
) -> Tensor | None:
    """Return x + attn(norm1(x)) = y, plus mlp(norm2(y)), for tokens x (B, T, C).

    Returns None if the compiled code cannot compute all of it, or is not selected for a layer.
    """
    if torch.is_grad_enabled() or not x.is_cpu or is_watched(x):
        return None
    if not x.is_contiguous() or x.ndim != 3:
        return None
    if not isinstance(attn, FullAttention | LocalAttention) or attn.rel_pos:
        return None
    packed, dim = is_joined(attn), x.shape[-1]
    hidden = getattr(getattr(mlp, "fc1", None), "out_features", 0)
    kinds = ((NORM_LINEAR, 3 * dim), (LINEAR_RESIDUAL, dim), (MLP, hidden))
    if not packed and not all(is_native(kind, x, size) for kind, size in kinds):
        return None
    weights = mlp_weights(norm2, mlp)
    if weights is None or not is_fused(norm1, attn, x, residual=True):
        return None
    if packed != is_packed(mlp.fc1, x):
        return None
    if packed:
        first, last = ((layer.packed, layer.bias) for layer in (attn.joined, attn.proj))
    else:
        first, last = join_projections(attn), (attn.proj.weight, attn.proj.bias)
    tensors = BlockWeights(norm1.weight, norm1.bias, *first, *last, *weights)
    given = [tensor for tensor in tensors if tensor is not None]
    if is_watched(x, *given) or is_transformed(x, *given) or overrides(attn, ("attend_qkv",)):
        return None
    # stands for the output of the projections, of which no value is read
    qkv = x.new_empty(1, dtype=compute_dtype(x)).expand(*x.shape[:2], 3 * dim)
    if isinstance(attn, LocalAttention):
        window, num_global = attn.window(grid), attn.num_global
        native = attn.is_native(qkv, window)
    else:
        window, num_global = one_chunk((1, x.shape[1])), 0
        native = attn.is_native(qkv, grid, None)
    if not native:
        return None
    options = dict(num_heads=attn.num_heads, num_global=num_global, scale=attn.scale)
    return block(x, tensors, window, eps=(norm1.eps, norm2.eps), packed=packed, **options)
