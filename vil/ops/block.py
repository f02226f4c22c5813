"""A transformer block without gradients, in one call of the C++ code for CPUs.

It computes the same as `linear`, `attend_qkv`, `linear` and `norm_mlp` of this package, bit for
bit. In a small model, for a single image, the Python code of these four takes much of the time.

Shapes: B batch, T tokens (global and local), C channels, F hidden channels.
"""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.backends import native
from vil.ops.layout import Layout
from vil.ops.linear import LinearCall
from vil.ops.linear_case import compute_dtype
from vil.ops.mlp import MlpCall
from vil.ops.native import library
from vil.ops.window import Window


class BlockWeights(NamedTuple):
    """The parameters of a block.

    gain, shift (C,): of the norm before attention. weight, bias (3C, C), (3C,): the projections to
    queries, keys and values. out_weight, out_bias (C, C), (C,): the output projection. The others
    are those of `MlpWeights`. The first two biases may be None.
    """

    gain: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    mlp_gain: Tensor
    mlp_shift: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor


class _Call(ctypes.Structure):
    """The C structure `BlockCall` of block.h."""

    _fields_ = [
        *((name, LinearCall) for name in ("first", "last")),
        ("attention", native.AttentionCall),
        ("mlp", MlpCall),
    ]


def block(
    x: Tensor, weights: BlockWeights, window: Window | Layout, *, num_heads: int, num_global: int,
    scale: float, eps: tuple[float, float], packed: bool,
) -> Tensor:  # fmt: skip
    """Return the output (B, T, C) of a block for contiguous tokens x (B, T, C).

    window, num_heads, num_global, scale: as in `attend_qkv`. eps: of both norms. packed: whether
    the weight matrices are from `pack_weight`. Raises ValueError for weights of a wrong shape.
    """
    dim, hidden = x.shape[-1], len(weights.bias1)
    half = compute_dtype(x) == torch.bfloat16
    _check(weights, dim, hidden, shared=2 if packed and half else 1)
    numbers, _kept = _numbers(
        x.shape, x.dtype, half, hidden, window, num_heads, num_global, scale, eps, packed,
        torch.get_num_threads(),
    )  # fmt: skip
    call, y = _Call.from_buffer_copy(numbers), torch.empty_like(x)
    tensors = [*library.as_float32(**weights._asdict()).items()]
    pointers = {name: tensor.data_ptr() for name, tensor in tensors}
    first, last, mlp = call.first, call.last, call.mlp
    first.x, mlp.y = x.data_ptr(), y.data_ptr()
    first.gain, first.shift = pointers["gain"], pointers["shift"]
    first.weight, first.bias = pointers["weight"], pointers.get("bias")
    last.weight, last.bias = pointers["out_weight"], pointers.get("out_bias")
    mlp.gain, mlp.shift = pointers["mlp_gain"], pointers["mlp_shift"]
    mlp.weight1, mlp.bias1 = pointers["weight1"], pointers["bias1"]
    mlp.weight2, mlp.bias2 = pointers["weight2"], pointers["bias2"]
    library.call("vil_block", call, False)
    return y


def _check(weights: BlockWeights, dim: int, hidden: int, shared: int) -> None:
    """Raise ValueError for weights of a wrong shape. shared: inputs in an element of a matrix."""
    inner, wide = dim // shared, hidden // shared
    shapes = (
        (dim,), (dim,), (3 * dim, inner), (3 * dim,), (dim, inner), (dim,), (dim,), (dim,),
        (hidden, inner), (hidden,), (dim, wide), (dim,),
    )  # fmt: skip
    for name, weight, shape in zip(weights._fields, weights, shapes):
        if weight is not None and weight.shape != shape:
            raise ValueError(
                f"a block of {dim} channels needs a {name} of shape {shape}, "
                f"got {tuple(weight.shape)}"
            )


@lru_cache(256)  # a model makes the same calls for each image
def _numbers(
    shape: torch.Size, dtype: torch.dtype, half: bool, hidden: int, window: Window | Layout,
    num_heads: int, num_global: int, scale: float, eps: tuple[float, float], packed: bool,
    threads: int,
) -> tuple[_Call, dict[str, Tensor]]:  # fmt: skip
    """Return the arguments of a call without its tensors, and tensors to keep with them."""
    batch, tokens, dim = shape
    if num_global + window.length != tokens or dim % num_heads:
        raise ValueError(
            f"a block cannot attend with {num_heads} heads of {dim} channels, {num_global} global "
            f"tokens and the grid {window.grid} to {tokens} tokens"
        )
    sizes = dict(rows=batch * tokens, threads=threads, packed=packed, compute_bfloat16=half)
    is_half = dtype == torch.bfloat16
    first = LinearCall(
        inputs=dim, outputs=3 * dim, x_bfloat16=is_half, y_bfloat16=half, eps=eps[0], **sizes
    )
    last = LinearCall(inputs=dim, outputs=dim, x_bfloat16=half, y_bfloat16=is_half, **sizes)
    keys, lists = native.key_fields(window)
    attention = native.AttentionCall(
        images=batch, heads=num_heads, rows=window.grid[0], cols=window.grid[1],
        num_global=num_global, dim=dim // num_heads, size=window.size, bfloat16=half,
        threads=threads, scale=scale, **keys,
        **{name: tensor.data_ptr() for name, tensor in lists.items()},
    )  # fmt: skip
    mlp = MlpCall(
        dim=dim, hidden=hidden, residual=True, tokens_bfloat16=is_half, eps=eps[1], **sizes
    )
    return _Call(first, last, attention, mlp), lists
