"""A patch embedding for CPU inference, computed by compiled code.

The C++ code computes the convolution, the layer norm and the sum with the position embeddings for a
few patches at a time, and writes the tokens once.

Shapes: B batch, c input channels, H W input size, p side of a patch, X Y grid of patches, L = X*Y
local tokens, G global tokens, C channels.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vil.ops.linear import Norm, pack_weight
from vil.ops.linear_case import CHANNELS_UNIT
from vil.ops.native import library
from vil.ops.operator_call import call_operator


class PackedPatches(NamedTuple):
    """The parameters of a patch embedding, packed for the compiled code on this machine.

    weight: weights of the convolution, as returned by `pack_weight`.
    bias (C,): bias of the convolution.
    gain (C,), shift (C,), eps: parameters of the layer norm. Without a norm, gain and shift are
    None.
    patch: side of a patch in pixels.
    adjacent_channels: whether the compiled code reads the images in the channels-last format.
    half: whether the convolution is in bfloat16.
    All tensors are float32. If `half`, each element of `weight` holds two bfloat16 values.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    eps: float
    patch: int
    adjacent_channels: bool
    half: bool


def can_pack_patches(weight: Tensor) -> bool:
    """Return whether `pack_patches` supports the weights (C, c, p, p) of a convolution."""
    return not (weight.shape[0] % CHANNELS_UNIT or weight[0].numel() % CHANNELS_UNIT)


def pack_patches(
    weight: Tensor, bias: Tensor | None, norm: Norm | None, *, adjacent_channels: bool
) -> PackedPatches:
    """Pack the parameters of a patch embedding for `embed_patches`.

    weight (C, c, p, p), bias (C,) or None: parameters of the convolution, float32 or bfloat16.
    norm: parameters of the layer norm after the convolution, or None. adjacent_channels: see
    `PackedPatches`.
    """
    half = weight.dtype == torch.bfloat16
    order = weight.permute(0, 2, 3, 1) if adjacent_channels else weight
    packed = pack_weight(order.flatten(1), half=half)
    gain, shift, eps = norm or (None, None, 0.0)
    bias, gain, shift = (None if x is None else x.detach().float() for x in (bias, gain, shift))
    return PackedPatches(packed, bias, gain, shift, eps, weight.shape[2], adjacent_channels, half)


def embed_patches(x: Tensor, packed: PackedPatches, added: Tensor, num_global: int) -> Tensor:
    """Return G global and L local tokens (B, G+L, C) of images x (B, c, H, W), without gradients.

    x: float32 or bfloat16, the dtype of the weights before they were packed. added (G+L, C)
    float32: the G global tokens, then L rows that are added to the local tokens, such as position
    embeddings.
    """
    return call_operator(_embed_patches, x, *packed, added, num_global)


@torch.library.custom_op("vil::embed_patches", mutates_args=())
def _embed_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None,
    eps: float, patch: int, adjacent_channels: bool, half: bool, added: Tensor, num_global: int,
) -> Tensor:  # fmt: skip
    grid = (x.shape[2] // patch, x.shape[3] // patch)
    tokens = num_global + grid[0] * grid[1]
    if added.shape != (tokens, len(weight)):
        raise ValueError(
            f"vil::embed_patches expected `added` of shape {(tokens, len(weight))}, got "
            f"{tuple(added.shape)}"
        )
    if x.stride(1 if adjacent_channels else 3) != 1:
        layout = torch.channels_last if adjacent_channels else torch.contiguous_format
        x = x.contiguous(memory_format=layout)
    y = _empty_tokens(x, weight, added)
    tensors = dict(x=x, y=y, weight=weight, bias=bias, gain=gain, shift=shift, added=added)
    numbers = _Call(
        strides=x.stride(), images=x.shape[0], channels=x.shape[1],
        grid=grid, patch=patch, outputs=weight.shape[0],
        num_global=num_global, threads=torch.get_num_threads(),
        adjacent_channels=adjacent_channels, bfloat16=half, eps=eps,
        **{name: None if t is None else t.data_ptr() for name, t in tensors.items()},
    )  # fmt: skip
    if len(x):
        library.call("vil_embed_patches", numbers, False)
    return y


@_embed_patches.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None,
    eps: float, patch: int, adjacent_channels: bool, half: bool, added: Tensor, num_global: int,
) -> Tensor:  # fmt: skip
    return _empty_tokens(x, weight, added)


def _empty_tokens(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], added.shape[0], weight.shape[0]))


class _Call(ctypes.Structure):
    """The C structure `PatchCall` of patches.h: the arguments of a call of the native library."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "weight", "bias", "gain", "shift")),
        ("added", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("images", "channels")),
        ("grid", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("patch", "outputs", "num_global", "threads")),
        *((name, ctypes.c_int64) for name in ("adjacent_channels", "bfloat16")),
        ("eps", ctypes.c_double),
    ]


@register_flop_formula(torch.ops.vil.embed_patches)
def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    patch = rest[4]
    grid = (x_shape[2] // patch) * (x_shape[3] // patch)
    return 2 * x_shape[0] * grid * weight_shape[0] * x_shape[1] * patch**2
