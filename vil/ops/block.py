"""A transformer block without gradients, in one call of the C++ code for CPUs.

It computes the same as `linear`, `attend_qkv`, `linear` and `norm_mlp` of this package, bit for
bit. In a small model, for a single image, the Python code of these four takes a third of the time.

Shapes: B batch, T tokens (global and local), C channels.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.backends import native
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.linear import LinearCall, Norm
from vil.ops.linear import structure as linear_structure
from vil.ops.mlp import MlpCall, MlpWeights
from vil.ops.mlp import structure as mlp_structure
from vil.ops.native import library
from vil.ops.window import Window


class BlockWeights(NamedTuple):
    """The parameters of a block: contiguous float32 tensors, or packed weights.

    norm: of the attention. first, last: weight and bias of the projections to queries, keys and
    values, and of the output projection. mlp, eps: the norm and the MLP, and the norm's epsilon.
    """

    norm: Norm
    first: tuple[Tensor, Tensor | None]
    last: tuple[Tensor, Tensor | None]
    mlp: MlpWeights
    eps: float


class _Call(ctypes.Structure):
    """The C structure `BlockCall` of block.h."""

    _fields_ = [
        *((name, LinearCall) for name in ("first", "last")),
        ("attention", native.AttentionCall),
        ("mlp", MlpCall),
    ]


class BlockCall:
    """The prepared call of a block, for tokens of one shape (B, T, C) and dtype.

    x: such tokens, contiguous. weights: they are read at each call, so their memory must stay.
    window: which local keys each local query attends to. num_heads, num_global, scale: as in
    `attend_qkv`. half: whether to multiply in bfloat16. packed: whether the weights of the linear
    layers are from `pack_weight`.
    """

    def __init__(
        self, x: Tensor, weights: BlockWeights, window: Window | Layout, *, num_heads: int,
        num_global: int, scale: float, half: bool, packed: bool,
    ) -> None:  # fmt: skip
        batch, _, dim = x.shape
        inner = x.new_empty(x.shape, dtype=torch.bfloat16 if half else torch.float32)
        qkv = inner.new_empty(*x.shape[:2], 3 * dim)
        options = dict(half=half, packed=packed)
        norm, (first, first_bias), (last, last_bias) = weights[:3]
        given = dict(x=x, y=qkv, gain=norm.gain, shift=norm.shift, weight=first, bias=first_bias)
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        numbers = _Call(first=linear_structure(tensors, dim, eps=norm.eps, **options))
        given = dict(x=inner, y=x, weight=last, bias=last_bias)
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        numbers.last = linear_structure(tensors, dim, **options)
        q = inner[:, num_global:].unflatten(2, (num_heads, -1)).transpose(1, 2)
        call = Call(q, q, q, window, num_global, scale=scale)
        numbers.attention, kept = native.structure(call, {}, {})
        tensors = {"x": x, "y": x, **weights.mlp._asdict()}
        numbers.mlp = mlp_structure(tensors, eps=weights.eps, residual=True, **options)
        self._numbers, self._kept = numbers, (weights, kept)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output (B, T, C) for contiguous tokens x of the call's shape and dtype."""
        y = torch.empty_like(x)
        numbers = _Call.from_buffer_copy(self._numbers)
        numbers.first.x, numbers.mlp.y = x.data_ptr(), y.data_ptr()
        library.call("vil_block", numbers, False)
        return y
