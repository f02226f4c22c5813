"""A layer norm and an MLP, the second half of a transformer block, as one operation.

`norm_mlp` uses PyTorch's operators (the backend "torch") or C++ code for CPUs ("native"). The C++
code keeps the hidden activations of a few tokens in the CPU cache. In training, it saves the
outputs of the first linear layer only if reading them is faster than computing them again.

Shapes: ... leading dimensions, C channels, F hidden channels.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from vil.ops.linear_case import MLP, compute_dtype, is_native
from vil.ops.native import library
from vil.ops.operator_call import call_operator, differentiable_gradients
from vil.utils.precision import autocast_off

SAVED_DIM = 192  # channels from which on hidden activations in float32 are saved in training


class MlpWeights(NamedTuple):
    """The parameters of a layer norm and an MLP.

    gain, shift (C,): weight and bias of the layer norm. weight1 (F, C), bias1 (F,): first linear
    layer. weight2 (C, F), bias2 (C,): second linear layer.
    """

    gain: Tensor
    shift: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor


def norm_mlp(x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False) -> Tensor:
    """Return linear2(gelu(linear1(norm(x)))) for x (..., C), plus x itself if `residual`.

    The norm is a layer norm over the channels, with `eps` added to the variance. The GELU is exact.
    If `vil tune` has measured this shape, the fastest backend is used, else PyTorch's operators.
    """
    native = is_native(MLP, x, weights.weight1.shape[0], *weights)
    compute = norm_mlp_native if native else norm_mlp_torch
    return compute(x, weights, eps=eps, residual=residual)


def norm_mlp_torch(x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False) -> Tensor:
    """Compute `norm_mlp` with PyTorch's operators."""
    gain, shift, weight1, bias1, weight2, bias2 = weights
    normed = F.layer_norm(x, gain.shape, gain, shift, eps)
    y = F.linear(F.gelu(F.linear(normed, weight1, bias1)), weight2, bias2)
    return x + y if residual else y


def norm_mlp_native(
    x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False
) -> Tensor:
    """Compute `norm_mlp` with C++ code for CPUs.

    Under autocast, the matmuls are in the autocast dtype. The output has the dtype of x.
    """
    half = compute_dtype(x) == torch.bfloat16
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    saves = differentiates and not half and x.shape[-1] >= SAVED_DIM
    return call_operator(_norm_mlp, x, *weights, eps, half, residual, saves)[0]


class PackedWeights(NamedTuple):
    """The parameters of a layer norm and an MLP, packed for the C++ backend on this machine.

    gain, shift (C,): weight and bias of the layer norm. packed: flat tensor with the weights of
    both linear layers. bias1 (F,), bias2 (C,): biases of the linear layers. half: whether the
    matmuls are in bfloat16.

    The dtype of all tensors is float32. If `half` is True, the 32 bits of each element of `packed`
    are two bfloat16 weights.
    """

    gain: Tensor
    shift: Tensor
    packed: Tensor
    bias1: Tensor
    bias2: Tensor
    half: bool


def pack_weights(weights: MlpWeights, *, half: bool) -> PackedWeights:
    """Pack the parameters of a layer norm and an MLP for `norm_mlp_packed`.

    half: whether to multiply in bfloat16. The numbers of channels C and F must be multiples of
    CHANNELS_UNIT.
    """
    full = library.as_float32(**weights._asdict())
    packed = full["weight1"].new_empty(2 * full["weight1"].numel() // (2 if half else 1))
    _call("vil_pack_mlp", {**full, "packed": packed}, half=half)
    kept = (full[name] for name in ("gain", "shift", "bias1", "bias2"))
    gain, shift, bias1, bias2 = (x.clone() for x in kept)
    return PackedWeights(gain, shift, packed, bias1, bias2, half)


def norm_mlp_packed(
    x: Tensor, weights: PackedWeights, *, eps: float, residual: bool = False
) -> Tensor:
    """Compute `norm_mlp` with C++ code for CPUs and packed weights, without gradients."""
    *tensors, half = weights
    return call_operator(_packed_norm_mlp, x, *tensors, eps, half, residual)


@torch.library.custom_op("vil::norm_mlp", mutates_args=())
def _norm_mlp(
    x: Tensor, gain: Tensor, shift: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
    bias2: Tensor, eps: float, half: bool, residual: bool, saves: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (output, hidden).

    hidden: the outputs of the first linear layer before its bias is added, for the backward pass.
    An empty tensor if `saves` is False.
    """
    weights = MlpWeights(gain, shift, weight1, bias1, weight2, bias2)
    x = x.contiguous()
    y, hidden = torch.empty_like(x), _empty_hidden(x, bias1, saves)
    tensors = {"x": x, "y": y, "saved": hidden, **library.as_float32(**weights._asdict())}
    _call("vil_mlp", tensors, half=half, eps=eps, residual=residual)
    return y, hidden


def _empty_hidden(x: Tensor, bias1: Tensor, saves: bool) -> Tensor:
    shape = (*x.shape[:-1], len(bias1)) if saves else (0,)
    return x.new_empty(shape, dtype=torch.float32)


@_norm_mlp.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
    bias2: Tensor, eps: float, half: bool, residual: bool, saves: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, _empty_hidden(x, bias1, saves)


@torch.library.custom_op("vil::packed_norm_mlp", mutates_args=())
def _packed_norm_mlp(
    x: Tensor, gain: Tensor, shift: Tensor, packed: Tensor, bias1: Tensor, bias2: Tensor,
    eps: float, half: bool, residual: bool,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    y = torch.empty_like(x)
    tensors = dict(x=x, y=y, gain=gain, shift=shift, packed=packed, bias1=bias1, bias2=bias2)
    _call("vil_mlp", tensors, half=half, eps=eps, residual=residual)
    return y


@_packed_norm_mlp.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("vil::norm_mlp_gradient", mutates_args=())
def _norm_mlp_gradient(
    x: Tensor, gain: Tensor, shift: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
    bias2: Tensor, hidden: Tensor, eps: float, half: bool, residual: bool, dy: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x and the weights. hidden: the second output of `_norm_mlp`."""
    weights = MlpWeights(gain, shift, weight1, bias1, weight2, bias2)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    make = x.new_empty if x.numel() else x.new_zeros  # without tokens nothing is written
    grads = [make(w.shape, dtype=torch.float32) for w in weights]
    names = [f"d{name}" for name in MlpWeights._fields]
    tensors = dict(zip(names, grads), x=x, dy=dy, dx=dx, saved=hidden)
    tensors |= library.as_float32(**weights._asdict())
    _call("vil_mlp", tensors, half=half, is_backward=True, eps=eps, residual=residual)
    return [dx, *(grad.to(w.dtype) for grad, w in zip(grads, weights))]


@_norm_mlp_gradient.register_fake
def _(x: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *rest[:6])]


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.half, ctx.residual, _ = inputs
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)  # the gradient of `hidden` would be a tensor of zeros
    ctx.save_for_backward(*tensors, hidden)


def _differentiate(ctx: FunctionCtx, dy: Tensor | None, dhidden: Tensor | None) -> tuple:
    if dy is None:
        return (None,) * 11
    *saved, hidden = ctx.saved_tensors  # read once: gradient checkpointing allows no more
    if torch.is_grad_enabled():  # a second derivative may follow
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.half):
            y = norm_mlp_torch(saved[0], MlpWeights(*saved[1:]), eps=ctx.eps, residual=ctx.residual)
        grads = differentiable_gradients(y, saved, dy, ctx.needs_input_grad[:7])
    else:
        with autocast_off("cpu"):
            numbers = (ctx.eps, ctx.half, ctx.residual)
            grads = call_operator(_norm_mlp_gradient, *saved, hidden, *numbers, dy)
    return *grads, None, None, None, None


_norm_mlp.register_autograd(_differentiate, setup_context=_setup_context)


class _Call(ctypes.Structure):
    """The C structure `MlpCall` of mlp.h, the arguments of the C++ functions."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "dy", "y", "dx")),
        *((name, ctypes.c_void_p) for name in MlpWeights._fields),
        *((f"d{name}", ctypes.c_void_p) for name in MlpWeights._fields),
        *((name, ctypes.c_void_p) for name in ("saved", "packed")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "hidden", "residual", "threads")),
        *((name, ctypes.c_int64) for name in ("compute_bfloat16", "tokens_bfloat16")),
        ("eps", ctypes.c_double),
    ]


def _call(
    function: str, tensors: dict[str, Tensor], *, half: bool, is_backward: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    """Call a function of the native library.

    tensors: {field name of `_Call`: contiguous tensor}, the inputs of the function and the buffers
    for its results. half: whether to multiply in bfloat16. settings: values of the fields eps and
    residual of `_Call`.
    """
    x = tensors.get("x")
    hidden, dim = tensors["bias1"].numel(), tensors["bias2"].numel()
    numbers = _Call(
        rows=0 if x is None else x.numel() // dim, dim=dim, hidden=hidden,
        threads=torch.get_num_threads(), compute_bfloat16=half,
        tokens_bfloat16=x is not None and x.dtype == torch.bfloat16,
        **settings, **{name: t.data_ptr() or None for name, t in tensors.items()},
    )  # fmt: skip
    library.call(function, numbers, is_backward)


@register_flop_formula([torch.ops.vil.norm_mlp, torch.ops.vil.packed_norm_mlp])
def _flops(x_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the forward pass, the matmuls of the two linear layers."""
    num_hidden = rest[3][0]  # of the bias of the first linear layer
    return 2 * 2 * num_hidden * torch.Size(x_shape).numel()


@register_flop_formula(torch.ops.vil.norm_mlp_gradient)
def _gradient_flops(x_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    num_matmuls = 4 if torch.Size(rest[6]).numel() else 5
    return _flops(x_shape, *rest) // 2 * num_matmuls
