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
from torch.utils.flop_counter import register_flop_formula

from vil.ops.linear_case import MLP, compute_dtype, is_native, no_packed_gradients
from vil.ops.native import library
from vil.ops.operator_call import Context, call_operator, differentiable_gradients
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


def norm_mlp(
    x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False, packed: bool = False
) -> Tensor:
    """Return linear2(gelu(linear1(norm(x)))) for x (..., C), plus x itself if `residual`.

    The norm is a layer norm over the channels, with `eps` added to the variance. The GELU is exact.
    packed: whether both weight matrices are from `pack_weight`. Then the C++ code computes the
    call, without gradients. Otherwise `vil.ops.linear_case` selects the backend.
    """
    if packed or is_native(MLP, x, weights.weight1.shape[0], *weights):
        return norm_mlp_native(x, weights, eps=eps, residual=residual, packed=packed)
    return norm_mlp_torch(x, weights, eps=eps, residual=residual)


def norm_mlp_torch(x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False) -> Tensor:
    """Compute `norm_mlp` with PyTorch's operators."""
    gain, shift, weight1, bias1, weight2, bias2 = weights
    normed = F.layer_norm(x, gain.shape, gain, shift, eps)
    y = F.linear(F.gelu(F.linear(normed, weight1, bias1)), weight2, bias2)
    return x + y if residual else y


def norm_mlp_native(
    x: Tensor, weights: MlpWeights, *, eps: float, residual: bool = False, packed: bool = False
) -> Tensor:
    """Compute `norm_mlp` with C++ code for CPUs.

    Under autocast, the matmuls are in the autocast dtype. The output has the dtype of x.
    """
    half = compute_dtype(x) == torch.bfloat16
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    saves = differentiates and not half and x.shape[-1] >= SAVED_DIM
    return call_operator(_norm_mlp, x, *weights, eps, half, residual, saves, packed)[0]


@torch.library.custom_op("vil::norm_mlp", mutates_args=())
def _norm_mlp(
    x: Tensor, gain: Tensor, shift: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
    bias2: Tensor, eps: float, half: bool, residual: bool, saves: bool = False,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (output, hidden).

    hidden: the outputs of the first linear layer before its bias is added, for the backward pass.
    An empty tensor if `saves` is False.
    """
    weights = MlpWeights(gain, shift, weight1, bias1, weight2, bias2)
    x = x.contiguous()
    y, hidden = torch.empty_like(x), _empty_hidden(x, bias1, saves)
    tensors = {"x": x, "y": y, "saved": hidden, **library.as_float32(**weights._asdict())}
    _call(tensors, half=half, eps=eps, residual=residual, packed=packed)
    return y, hidden


def _empty_hidden(x: Tensor, bias1: Tensor, saves: bool) -> Tensor:
    shape = (*x.shape[:-1], len(bias1)) if saves else (0,)
    return x.new_empty(shape, dtype=torch.float32)


@_norm_mlp.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
    bias2: Tensor, eps: float, half: bool, residual: bool, saves: bool = False,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, _empty_hidden(x, bias1, saves)


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
    _call(tensors, half=half, is_backward=True, eps=eps, residual=residual)
    return [dx, *(grad.to(w.dtype) for grad, w in zip(grads, weights))]


@_norm_mlp_gradient.register_fake
def _(x: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *rest[:6])]


def _setup_context(ctx: Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.half, ctx.residual, _, ctx.packed = inputs
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)  # the gradient of `hidden` would be a tensor of zeros
    ctx.save_for_backward(*tensors, hidden)


def _differentiate(ctx: Context, dy: Tensor | None, dhidden: Tensor | None) -> tuple:
    if dy is None:
        return (None,) * 12
    if ctx.packed:
        raise no_packed_gradients()
    *saved, hidden = ctx.saved_tensors  # read once: gradient checkpointing allows no more
    if torch.is_grad_enabled():  # a second derivative may follow
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.half):
            y = norm_mlp_torch(saved[0], MlpWeights(*saved[1:]), eps=ctx.eps, residual=ctx.residual)
        grads = differentiable_gradients(y, saved, dy, ctx.needs_input_grad[:7])
    else:
        with autocast_off("cpu"):
            numbers = (ctx.eps, ctx.half, ctx.residual)
            grads = call_operator(_norm_mlp_gradient, *saved, hidden, *numbers, dy)
    return *grads, *5 * (None,)


_norm_mlp.register_autograd(_differentiate, setup_context=_setup_context)


class MlpCall(ctypes.Structure):
    """The C structure of the same name in mlp.h, the arguments of the C++ functions."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "dy", "y", "dx")),
        *((name, ctypes.c_void_p) for name in MlpWeights._fields),
        *((f"d{name}", ctypes.c_void_p) for name in MlpWeights._fields),
        ("saved", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "hidden", "residual", "threads")),
        *((name, ctypes.c_int64) for name in ("packed", "compute_bfloat16", "tokens_bfloat16")),
        ("eps", ctypes.c_double),
    ]


def _call(
    tensors: dict[str, Tensor], *, half: bool, is_backward: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    """Run the forward or backward pass of the native library.

    tensors: {field name of `MlpCall`: contiguous tensor}, the inputs of the function and the
    buffers for its results. half: whether to multiply in bfloat16. settings: the fields eps,
    residual and packed of `MlpCall`.
    """
    x = tensors["x"]
    hidden, dim = tensors["bias1"].numel(), tensors["bias2"].numel()
    numbers = MlpCall(
        rows=x.numel() // dim, dim=dim, hidden=hidden,
        threads=torch.get_num_threads(), compute_bfloat16=half,
        tokens_bfloat16=x.dtype == torch.bfloat16,
        **settings, **{name: t.data_ptr() or None for name, t in tensors.items()},
    )  # fmt: skip
    library.call("vil_mlp", numbers, is_backward)


@register_flop_formula([torch.ops.vil.norm_mlp])
def _flops(x_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the forward pass, the matmuls of the two linear layers."""
    num_hidden = rest[3][0]  # of the bias of the first linear layer
    return 2 * 2 * num_hidden * torch.Size(x_shape).numel()


@register_flop_formula(torch.ops.vil.norm_mlp_gradient)
def _gradient_flops(x_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    num_matmuls = 4 if torch.Size(rest[6]).numel() else 5
    return _flops(x_shape, *rest) // 2 * num_matmuls
