"""Join a forward and a backward pass that recomputes the scores into a backend.

The fastest forward and the fastest backward pass may come from different libraries, so that any
pair is a backend (as in the meta-optimizer of Theano's convolutions).

All passes share one contract of tensors and a `CallSpec`:

    forward(q, k, v, table, to_global, valid_hw, spec) -> out, lse
    backward(q, k, v, table, to_global, valid_hw, out, lse, dout, spec)
        -> dq, dk, dv, dtable or None, dto_global or None

out (B, N, L, D). lse (B, N, L): the natural logarithm of the sum of exponentials of each row,
float32 (float64 for float64), -inf for a row without keys. Other arguments are those of
`vil.ops.local_attention`. A pair is a torch operator, opaque to torch.compile and torch.export,
with a FLOP formula for FlopCounterMode.

Shapes: B batch, N heads, L tokens, D channels.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from vil.ops.attention_case import Case
from vil.ops.backends import BACKWARDS, FORWARDS, blocked
from vil.ops.backends.chunk_groups import chunk_groups, halo_size
from vil.ops.bias import LocalBias
from vil.ops.call_spec import CallSpec
from vil.ops.window import Window
from vil.utils.precision import autocast_off


def join_limits(forward: str, backward: str) -> Callable[[Case], list[str]]:
    """The function that gives the reasons against a pair of passes."""

    forward_limits, backward_limits = FORWARDS[forward].unsupported, BACKWARDS[backward].unsupported

    def unsupported(case: Case) -> list[str]:
        reasons = list(forward_limits(case))
        if case.needs_grad:
            reasons += backward_limits(case)
        elif forward != backward:
            reasons.append(f"without gradients the backend {forward} does the same")
        return list(dict.fromkeys(reasons))

    return unsupported


def join_passes(forward: str, backward: str) -> Callable[..., Tensor]:
    """Join a forward and a backward pass into a backend, see `vil.ops.local_attention`.

    Declares torch operators: call it once per pair, before anything is compiled.
    """
    operator = _operator(forward, backward)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        *,
        num_global: int,
        bias: LocalBias,
        valid_hw: Tensor | None,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        assert dropout_p == 0, "`unsupported` refuses dropout"
        numbers = CallSpec(window, num_global, scale).numbers()
        return operator(q, k, v, bias.table, bias.to_global, valid_hw, numbers, scale)[0]

    return attend


def _operator(forward: str, backward: str) -> Callable:
    """vil::<forward>_<backward>, which returns out and lse."""
    run, name = FORWARDS[forward].run, f"vil::{forward}_{backward}"
    gradient = _gradient(backward)

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],  # noqa: UP045 - torch infers the schema from these
        to_global: Optional[Tensor],  # noqa: UP045
        valid_hw: Optional[Tensor],  # noqa: UP045
        numbers: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return run(q, k, v, table, to_global, valid_hw, CallSpec.of(numbers, scale))

    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.numbers, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: FunctionCtx, dout: Tensor, dlse: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{backward} has no second derivative: use chunk_autograd")
        saved = ctx.saved_tensors  # read once: gradient checkpointing allows no more
        grads = gradient(*saved, dout, ctx.numbers, ctx.scale)
        biases = [None if bias is None else grad for bias, grad in zip(saved[3:5], grads[3:])]
        return *grads[:3], *biases, None, None, None

    operator = torch.library.custom_op(name, compute, mutates_args=())
    operator.register_fake(
        lambda q, *rest: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=blocked.wide(q)))
    )
    operator.register_autograd(differentiate, setup_context=setup_context)
    _register_flops(name, 2, forward)
    return operator


@cache
def _gradient(backward: str) -> Callable:
    """vil::<backward>_gradient. The gradient of a missing bias is an empty tensor."""
    run, name = BACKWARDS[backward].run, f"vil::{backward}_gradient"

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],  # noqa: UP045
        to_global: Optional[Tensor],  # noqa: UP045
        valid_hw: Optional[Tensor],  # noqa: UP045
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        numbers: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with autocast_off(q.device.type):
            spec = CallSpec.of(numbers, scale)
            grads = run(q, k, v, table, to_global, valid_hw, out, lse, dout, spec)
        return tuple(q.new_empty(0) if grad is None else grad for grad in grads)

    def fake(q: Tensor, k: Tensor, v: Tensor, table: Tensor, to_global: Tensor, *rest) -> tuple:
        biases = [q.new_empty(0) if b is None else torch.empty_like(b) for b in (table, to_global)]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *biases

    operator = torch.library.custom_op(name, compute, mutates_args=())
    operator.register_fake(fake)
    _register_flops(name, 5, backward)
    return operator


def _register_flops(name: str, num_matmuls: int, direction: str) -> None:
    """Register the FLOPs of `num_matmuls` matmuls of all queries with their keys."""

    def flops(q_shape: Sequence[int], *rest, **kwargs) -> int:
        numbers = next(x for x in rest if isinstance(x, list | tuple) and len(x) > 6)
        spec = CallSpec.of(numbers, 1.0)
        batch, heads, _, dim = q_shape
        halo = int(spec.window.cyclic)
        if direction == "blocked":
            halo = halo_size(spec.window, batch * heads)
        return 2 * num_matmuls * batch * heads * dim * num_pairs(spec, halo)

    namespace, operator = name.split("::")
    register_flop_formula(getattr(getattr(torch.ops, namespace), operator))(flops)


def num_pairs(spec: CallSpec, halo: int) -> int:
    """Pairs of a query and a key that are multiplied, including the padding of chunks.

    halo: see `chunk_groups`.
    """
    tile = spec.window.tile
    return sum(
        group.num_blocks * group.num_queries * tile
        * (spec.num_global + len(group.keys) * tile)
        for group in chunk_groups(spec.window, halo)
    )  # fmt: skip
