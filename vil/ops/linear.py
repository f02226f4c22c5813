"""Linear layers, optionally after a layer norm and before a residual connection.

`linear` selects the backend for a call: "torch" (PyTorch's operators) or "native" (C++ code for
CPUs, which keeps normalized tokens in the cache).

Shapes: ... leading dimensions, I inputs, O outputs.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vil.ops.linear_case import CHANNELS_UNIT, compute_dtype, is_native, no_packed_gradients
from vil.ops.native import library
from vil.ops.operator_call import Context, call_operator, differentiable_gradients
from vil.utils.precision import autocast_off


class Norm(NamedTuple):
    """The parameters of a layer norm. gain, shift: weight and bias, one number per input channel.
    eps: added to the variance."""

    gain: Tensor
    shift: Tensor
    eps: float


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, packed: bool = False,
) -> Tensor:  # fmt: skip
    """Return norm(x) @ weight.T + bias + residual, a tensor (..., O).

    x (..., I). weight (O, I). bias (O,). residual (..., O). norm: a layer norm that is applied to x
    first. packed: whether `weight` is from `pack_weight`. Then the C++ code computes the call,
    without gradients. Otherwise `vil.ops.linear_case` selects the backend.
    """
    if packed:
        return linear_native(x, weight, bias, norm=norm, residual=residual, packed=True)
    parameters = (weight, bias, residual, *(norm[:2] if norm else ()))
    native = is_native(kind_of(norm, residual), x, weight.shape[0], *parameters)
    if residual is not None and residual.dtype not in (torch.float32, compute_dtype(x)):
        native = False
    compute = linear_native if native else linear_torch
    return compute(x, weight, bias, norm=norm, residual=residual)


def kind_of(norm: object, residual: object) -> str:
    """Return the kind of a call for `LinearCase`, such as "norm linear residual".

    norm, residual: None if the call has none.
    """
    parts = ("norm" if norm else "", "linear", "" if residual is None else "residual")
    return " ".join(filter(None, parts))


def linear_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `linear` with PyTorch's operators."""
    if norm:
        x = F.layer_norm(x, norm.gain.shape, norm.gain, norm.shift, norm.eps)
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def linear_native(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None,
    residual: Tensor | None = None, packed: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `linear` with C++ code for CPUs.

    Under autocast, the matmul is in the autocast dtype. The output has the dtype of `residual` or,
    without a residual, of the matmul. packed: whether `weight` is from `pack_weight`. If it is,
    gradients are not supported.
    """
    gain, shift, eps = norm or (None, None, 0.0)
    half = compute_dtype(x) == torch.bfloat16
    tensors = (gain, shift, weight, bias, residual)
    return call_operator(_linear, x, *tensors, eps, half, packed)


def pack_weight(weight: Tensor, *, half: bool) -> Tensor:
    """Copy a weight (O, I) to the memory layout that the C++ matmul reads.

    O and I must be multiples of CHANNELS_UNIT. half: whether to multiply in bfloat16. Returns
    float32 (O, I) or, if `half`, (O, I/2) with two bfloat16 values per element.
    """
    outputs, inputs = weight.shape
    packed = weight.new_empty(outputs, inputs // 2 if half else inputs, dtype=torch.float32)
    _call("vil_pack_linear", {"y": packed, **library.as_float32(weight=weight)}, inputs, half=half)
    return packed


@torch.library.custom_op("vil::linear", mutates_args=())
def _linear(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, eps: float, half: bool, packed: bool,
) -> Tensor:  # fmt: skip
    y = _empty_output(x, weight, residual, half)
    inputs = weight.shape[1] * (2 if packed and half else 1)
    if x.shape[-1] != inputs or inputs % CHANNELS_UNIT or weight.shape[0] % CHANNELS_UNIT:
        raise ValueError(
            f"vil::linear cannot multiply x {tuple(x.shape)} by a weight {tuple(weight.shape)}: "
            f"the weight must have {x.shape[-1]} inputs, and the numbers of inputs and outputs "
            f"must be multiples of {CHANNELS_UNIT}"
        )
    tensors = {"x": x.contiguous(), "y": y}
    if residual is not None:
        if residual.shape != y.shape:
            shape = tuple(residual.shape)
            raise ValueError(f"vil::linear expected a residual of {tuple(y.shape)}, got {shape}")
        tensors["residual"] = residual.contiguous()
    tensors |= library.as_float32(gain=gain, shift=shift, weight=weight, bias=bias)
    _call("vil_linear", tensors, x.shape[-1], half=half, eps=eps, packed=packed)
    return y


@_linear.register_fake
def _(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, eps: float, half: bool, packed: bool,
) -> Tensor:  # fmt: skip
    return _empty_output(x, weight, residual, half)


def _empty_output(x: Tensor, weight: Tensor, residual: Tensor | None, half: bool) -> Tensor:
    dtype = torch.bfloat16 if half else torch.float32
    dtype = dtype if residual is None else residual.dtype
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@torch.library.custom_op("vil::linear_gradient", mutates_args=())
def _linear_gradient(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, weight: Tensor, dy: Tensor, eps: float,
    half: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x, gain, shift, weight and bias.

    needs: for each of these gradients, whether it is needed. The others may be empty tensors.
    """
    grads = _empty_gradients(x, gain, weight, needs)
    names = ("dx", "dgain", "dshift", "dweight", "dbias")
    tensors = {name: grad for name, grad in zip(names, grads) if grad.numel()}
    tensors |= {"x": x.contiguous(), "dy": dy.contiguous()}
    tensors |= library.as_float32(gain=gain, shift=shift, weight=weight)
    _call("vil_linear", tensors, x.shape[-1], is_backward=True, half=half, eps=eps)
    return _as_parameters(grads, gain, weight)


@_linear_gradient.register_fake
def _(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, weight: Tensor, dy: Tensor, eps: float,
    half: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    return _as_parameters(_empty_gradients(x, gain, weight, needs), gain, weight)


def _empty_gradients(
    x: Tensor, gain: Tensor | None, weight: Tensor, needs: Sequence[bool]
) -> list[Tensor]:
    """Allocate the gradients of x, gain, shift, weight and bias.

    The gradient of x has the dtype of x, the others are float32. Gradients that are not computed
    are empty tensors. With a layer norm, the first three are all computed if one of them is needed.
    """
    of_norm = gain is not None and any(needs[:3])
    computed = (of_norm, of_norm, needs[3], needs[4])
    shapes = (x.shape[-1:], x.shape[-1:], weight.shape, weight.shape[:1])
    dx = x.new_empty(x.shape if needs[0] or of_norm else 0)
    make = x.new_empty if x.numel() else x.new_zeros  # without tokens nothing is written
    sums = (make(s if c else (0,), dtype=torch.float32) for s, c in zip(shapes, computed))
    return [dx, *sums]


def _as_parameters(grads: list[Tensor], gain: Tensor | None, weight: Tensor) -> list[Tensor]:
    dtypes = 2 * [weight.dtype if gain is None else gain.dtype] + 2 * [weight.dtype]
    return [grads[0], *(grad.to(dtype) for grad, dtype in zip(grads[1:], dtypes))]


def _setup_context(ctx: Context, inputs: tuple, output: Tensor) -> None:
    *tensors, residual, ctx.eps, ctx.half, ctx.packed = inputs
    ctx.residual = None if residual is None else residual.dtype
    ctx.dtype = output.dtype
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Context, dy: Tensor) -> tuple:
    saved = ctx.saved_tensors  # read once: gradient checkpointing allows no more
    needs = list(ctx.needs_input_grad[:5])
    if ctx.packed:
        raise no_packed_gradients()
    if torch.is_grad_enabled():  # a second derivative may follow
        x, gain, shift, weight, bias = saved
        norm = None if gain is None else Norm(gain, shift, ctx.eps)
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.half):
            y = linear_torch(x, weight, bias, norm=norm)
        grads = differentiable_gradients(y, saved, dy, needs)
    else:
        with autocast_off("cpu"):
            dy = dy.to(ctx.dtype)
            grads = call_operator(_linear_gradient, *saved[:4], dy, ctx.eps, ctx.half, needs)
    of_residual = None if ctx.residual is None else dy.to(ctx.residual)
    grads = (grad if needed else None for grad, needed in zip(grads, needs))
    return *grads, of_residual, None, None, None


_linear.register_autograd(_differentiate, setup_context=_setup_context)


class LinearCall(ctypes.Structure):
    """The C structure of the same name in linear.h: the arguments of a pass."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "dy", "residual", "y", "dx")),
        *((name, ctypes.c_void_p) for name in ("gain", "shift", "weight", "bias")),
        *((name, ctypes.c_void_p) for name in ("dgain", "dshift", "dweight", "dbias")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "threads", "packed")),
        *((name, ctypes.c_int64) for name in ("compute_bfloat16", "x_bfloat16", "y_bfloat16")),
        ("eps", ctypes.c_double),
    ]


def _call(
    function: str, tensors: dict[str, Tensor], inputs: int, *, half: bool,
    is_backward: bool = False, **settings: Any,
) -> None:  # fmt: skip
    """Call a function of the native library, which writes its results to some of `tensors`.

    tensors: {field name of `LinearCall`: contiguous tensor}. inputs: number of input channels.
    half: whether to multiply in bfloat16. settings: the fields eps and packed of `LinearCall`.
    """
    x, y = tensors.get("x"), tensors["dy" if is_backward else "y"]
    numbers = LinearCall(
        rows=0 if x is None else x.numel() // inputs, inputs=inputs,
        outputs=tensors["weight"].shape[0], threads=torch.get_num_threads(), compute_bfloat16=half,
        x_bfloat16=x is not None and x.dtype == torch.bfloat16,
        y_bfloat16=y.dtype == torch.bfloat16, **settings,
        **{name: t.data_ptr() for name, t in tensors.items()},
    )  # fmt: skip
    library.call(function, numbers, is_backward)


@register_flop_formula(torch.ops.vil.linear)
def _flops(
    x_shape: Sequence[int], gain: Any, shift: Any, weight_shape: Sequence[int], *args: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * torch.Size(x_shape).numel() * weight_shape[0]


@register_flop_formula(torch.ops.vil.linear_gradient)
def _gradient_flops(
    x_shape: Sequence[int], gain: Any, shift: Any, weight_shape: Sequence[int],
    dy_shape: Sequence[int], eps: float, half: bool, needs: Sequence[bool], **kwargs: Any,
) -> int:  # fmt: skip
    num_matmuls = any(needs[:3]) + needs[3]
    return _flops(x_shape, gain, shift, weight_shape) * num_matmuls
