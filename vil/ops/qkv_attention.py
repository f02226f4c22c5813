"""Attention of local and global tokens from one qkv tensor, computed by C++ code for CPUs.

One call computes what otherwise takes two: `vil.ops.local_attention` (backend "native") for the
local queries, and `scaled_dot_product_attention` for the global queries. It reads the output of the
qkv linear layer and writes the outputs of all tokens to one tensor, so nothing is concatenated or
added afterward. The same holds for the gradients.

Shapes: B batch, N heads, D head dim, C = N*D, L local tokens, G global tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vil.ops.backends import native
from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.call import Call, find_pattern, from_numbers, to_numbers
from vil.ops.custom_op import no_second_derivative, num_pairs
from vil.ops.layout import Layout
from vil.ops.native import library
from vil.ops.operator_call import Context, call_operator
from vil.ops.window import Window
from vil.utils.precision import autocast_off

NATIVE = "native"  # the backend of local attention that runs the same C++ code


def attend_qkv(
    qkv: Tensor,
    window: Window | Layout,
    *,
    num_heads: int,
    num_global: int = 0,
    bias: LocalBias = NO_BIAS,
    from_globals: Tensor | None = None,
    scale: float,
) -> Tensor:
    """Return the attention output (B, G+L, C) of global tokens, then local tokens.

    qkv (B, G+L, 3C): queries, keys and values of G global, then L local tokens.
    window: which local keys each local query attends to. Global queries attend to all keys.
    num_heads, num_global: N and G.
    bias: bias of the scores of local queries, as in `vil.ops.local_attention`.
    from_globals (N, G, G+1): bias of the scores of global queries: G values toward the global keys,
    and one toward all local keys.
    scale: factor of q @ k^T.
    The backend "native" must support the arguments. Raises ValueError for wrong shapes.
    """
    numbers = to_numbers(window, num_global)
    return call_operator(_attend, qkv, *bias, from_globals, numbers, num_heads, scale)


@torch.library.custom_op("vil::attend_qkv", mutates_args=())
def _attend(
    qkv: Tensor, table: Tensor | None, to_global: Tensor | None, from_globals: Tensor | None,
    numbers: list[int], num_heads: int, scale: float,
) -> Tensor:  # fmt: skip
    _check(qkv, (table, to_global, from_globals), numbers, num_heads)
    qkv = qkv.contiguous()
    out = qkv.new_empty(_output_shape(qkv))
    call, q_global = _split(qkv, table, to_global, numbers, num_heads, scale)
    out_global, local = _split_queries(out, call.num_global, num_heads, call.q.shape[3])
    tokens = {"out": local}
    if call.num_global:
        tokens |= {"q_global": q_global, "out_global": out_global}
    native.run(call, False, tokens, library.as_float32(from_globals=from_globals))
    return out


@_attend.register_fake
def _(qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(_output_shape(qkv))


def _check(
    qkv: Tensor, biases: Sequence[Tensor | None], numbers: Sequence[int], num_heads: int
) -> None:
    """Raise ValueError if qkv or a bias has a wrong shape. biases: table, to_global, from_globals.
    numbers: result of `to_numbers`."""
    window, num_global = from_numbers(numbers)
    tokens = num_global + window.length
    if qkv.ndim != 3 or qkv.shape[1] != tokens or qkv.shape[2] % (3 * num_heads):
        raise ValueError(
            f"qkv must be (B, {tokens}, 3C) for {num_global} global tokens and the grid "
            f"{window.grid}, with C a multiple of {num_heads} (the number of heads), "
            f"got shape {tuple(qkv.shape)}"
        )
    sizes = ((window.table_entries,), (num_global,), (num_global, num_global + 1))
    for bias, size in zip(biases, sizes):
        if bias is not None and bias.shape != (num_heads, *size):
            raise ValueError(
                f"expected a bias of shape {(num_heads, *size)}, got {tuple(bias.shape)}"
            )


def _output_shape(qkv: Tensor) -> tuple[int, int, int]:
    batch, tokens, channels = qkv.shape
    return batch, tokens, channels // 3


def _split(
    qkv: Tensor, table: Tensor | None, to_global: Tensor | None, numbers: Sequence[int],
    num_heads: int, scale: float,
) -> tuple[Call, Tensor]:  # fmt: skip
    """Return (call, q_global) with views of qkv.

    call: the `Call` of the local queries. q_global (B, N, G, D): the global queries.
    numbers: result of `to_numbers`.
    """
    window, num_global = from_numbers(numbers)
    channels = qkv.shape[2] // 3
    head_dim = channels // num_heads
    q_global, q = _split_queries(qkv, num_global, num_heads, head_dim)
    k, v = (_view_heads(qkv, num_heads, head_dim, channel=i * channels) for i in (1, 2))
    bias = LocalBias(table, to_global)
    return Call(q, k, v, window, num_global, bias, scale=scale), q_global


def _split_queries(
    x: Tensor, num_global: int, num_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """View the first N*D channels of G global and L local tokens as N heads.

    x: (B, G+L, channels). Returns the views (B, N, G, D) and (B, N, L, D).
    """
    first = _view_heads(x, num_heads, head_dim, count=num_global)
    return first, _view_heads(x, num_heads, head_dim, token=num_global)


def _view_heads(
    x: Tensor, num_heads: int, head_dim: int, *, token: int = 0, count: int | None = None,
    channel: int = 0,
) -> Tensor:  # fmt: skip
    """View N*D consecutive channels of consecutive tokens as N heads, (B, N, count, D).

    x: (B, tokens, channels), contiguous. token, channel: first token and first channel of the view.
    count: number of tokens; None for all from `token` on.
    """
    batch, tokens, width = x.shape
    shape = (batch, num_heads, tokens - token if count is None else count, head_dim)
    offset = x.storage_offset() + token * width + channel
    # one `as_strided` takes a fifth of the time of several views
    return x.as_strided(shape, (tokens * width, head_dim, width, 1), offset)


@torch.library.custom_op("vil::attend_qkv_gradient", mutates_args=())
def _gradient(
    qkv: Tensor, table: Tensor | None, to_global: Tensor | None, from_globals: Tensor | None,
    dout: Tensor, numbers: list[int], num_heads: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of qkv, table, to_global and from_globals.

    The gradient of a bias that is None is an empty tensor. numbers: result of `to_numbers`.
    """
    qkv, dout = qkv.contiguous(), dout.contiguous()
    dqkv = torch.empty_like(qkv)
    biases = (table, to_global, from_globals)
    call, q_global = _split(qkv, table, to_global, numbers, num_heads, scale)
    grads, dq_global = _split(dqkv, None, None, numbers, num_heads, scale)
    dout_global, dout = _split_queries(dout, call.num_global, num_heads, call.q.shape[3])
    tokens = {"dout": dout, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    if call.num_global:
        tokens |= {"q_global": q_global, "dout_global": dout_global, "dq_global": dq_global}
    names = ("dtable", "dto_global", "dfrom_globals")
    given = dict(zip(names, biases))
    sums = {
        name: None if bias is None else bias.new_zeros(bias.shape, dtype=torch.float32)
        for name, bias in given.items()
    }
    native.run(call, True, tokens, sums | library.as_float32(from_globals=from_globals))
    return [dqkv, *(_like_parameter(sums[name], bias, qkv) for name, bias in given.items())]


@_gradient.register_fake
def _(
    qkv: Tensor, table: Tensor | None, to_global: Tensor | None, from_globals: Tensor | None,
    *rest: Any,
) -> list[Tensor]:  # fmt: skip
    biases = (table, to_global, from_globals)
    empty = (qkv.new_empty(0) if bias is None else torch.empty_like(bias) for bias in biases)
    return [torch.empty_like(qkv, memory_format=torch.contiguous_format), *empty]


def _like_parameter(grad: Tensor | None, bias: Tensor | None, qkv: Tensor) -> Tensor:
    """Copy a bias's gradient to a tensor with the dtype and strides of the bias. Returns an empty
    tensor if the bias is None."""
    if grad is None or bias is None:
        return qkv.new_empty(0)
    return torch.empty_like(bias).copy_(grad)


def _setup_context(ctx: Context, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.numbers, ctx.num_heads, ctx.scale = inputs
    ctx.pattern = find_pattern(ctx.numbers)  # kept, because the backward pass looks it up
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Context, dout: Tensor) -> tuple:
    if torch.is_grad_enabled():
        raise no_second_derivative(NATIVE)
    saved = ctx.saved_tensors  # read once: gradient checkpointing allows no more
    with autocast_off("cpu"):
        dout = dout.to(saved[0].dtype)
        grads = call_operator(_gradient, *saved, dout, ctx.numbers, ctx.num_heads, ctx.scale)
    grads = (None if x is None else grad for x, grad in zip(saved, grads))
    return *grads, None, None, None


_attend.register_autograd(_differentiate, setup_context=_setup_context)


def _num_products(qkv_shape: Sequence[int], numbers: Sequence[int]) -> int:
    """Count the multiply-accumulates of a matmul of all queries with their keys. numbers: result
    of `to_numbers`."""
    batch, tokens, channels = qkv_shape
    window, num_global = from_numbers(numbers)
    if isinstance(window, Window) and window.covers_grid:  # without the padding of its chunk
        return batch * channels // 3 * tokens**2
    return batch * channels // 3 * (num_pairs(window, num_global) + num_global * tokens)


@register_flop_formula(torch.ops.vil.attend_qkv)
def _flops(qkv_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    return 2 * 2 * _num_products(qkv_shape, rest[3])


@register_flop_formula(torch.ops.vil.attend_qkv_gradient)
def _gradient_flops(qkv_shape: Sequence[int], *rest: Any, **kwargs: Any) -> int:
    return 2 * 5 * _num_products(qkv_shape, rest[4])
