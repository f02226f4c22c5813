"""Forward and backward passes that compute the scores anew, joined to backends.

The best forward and the best backward need not come from one library, so any pair is a backend (the
idea of the meta-optimizer of Theano's convolutions).

All share one contract of flat tensors and static facts, so that any forward goes with any backward:

    forward(q, k, v, table, to_global, valid, facts) -> out, lse
    backward(q, k, v, table, to_global, valid, out, lse, dout, facts)
        -> dq, dk, dv, dtable or None, dto_global or None

out (B, N, L, D); lse (B, N, L), the natural logarithm of each row's sum of exponentials, float32
(float64 for float64), -inf for a row that sees nothing. The rest is as for
`vil.ops.local_attention`. A pair becomes an operator of torch, which torch.compile and torch.export
take as a whole and whose products FlopCounterMode counts.

Letters: B images, N heads, L tokens, D channels.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Optional

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vil.ops.attention_case import Case
from vil.ops.backends import BACKWARDS, FORWARDS, blocked
from vil.ops.backends.chunk_groups import chunks_around, cuts
from vil.ops.bias import LocalBias
from vil.ops.call_spec import CallSpec
from vil.ops.window import Window
from vil.utils.precision import autocast_off


def join_limits(forward: str, backward: str) -> Callable[[Case], list[str]]:
    """The function that gives the reasons against a pair of passes."""

    def unsupported(case: Case) -> list[str]:
        reasons = list(FORWARDS[forward].unsupported(case))
        if case.needs_grad:
            reasons += BACKWARDS[backward].unsupported(case)
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
        valid: Tensor | None,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        assert dropout_p == 0, "refused by the table of backends"
        numbers = CallSpec(window, num_global, scale).numbers()
        return operator(q, k, v, bias.table, bias.to_global, valid, numbers, scale)[0]

    return attend


def _operator(forward: str, backward: str) -> Callable:
    """vil::<forward>_<backward>, which returns out and lse."""
    run, name = FORWARDS[forward].run, f"vil::{forward}_{backward}"
    slope = _gradient(backward)

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],  # noqa: UP045 - torch reads the schema from these
        to_global: Optional[Tensor],  # noqa: UP045
        valid: Optional[Tensor],  # noqa: UP045
        numbers: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return run(q, k, v, table, to_global, valid, CallSpec.of(numbers, scale))

    def keep(ctx, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.numbers, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx, dout: Tensor, dlse: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{backward} has no second derivative: use chunk_autograd")
        saved = ctx.saved_tensors  # to be asked for once only, under gradient checkpointing
        grads = slope(*saved, dout, ctx.numbers, ctx.scale)
        biases = [None if bias is None else grad for bias, grad in zip(saved[3:5], grads[3:])]
        return *grads[:3], *biases, None, None, None

    operator = torch.library.custom_op(name, compute, mutates_args=())
    operator.register_fake(
        lambda q, *rest: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=blocked.wide(q)))
    )
    operator.register_autograd(differentiate, setup_context=keep)
    _count_products(name, 2, forward)
    return operator


@cache
def _gradient(backward: str) -> Callable:
    """vil::<backward>_gradient; a gradient that nobody wants is empty."""
    run, name = BACKWARDS[backward].run, f"vil::{backward}_gradient"

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],  # noqa: UP045
        to_global: Optional[Tensor],  # noqa: UP045
        valid: Optional[Tensor],  # noqa: UP045
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        numbers: Sequence[int],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with autocast_off(q.device.type):
            facts = CallSpec.of(numbers, scale)
            grads = run(q, k, v, table, to_global, valid, out, lse, dout, facts)
        return tuple(q.new_empty(0) if grad is None else grad for grad in grads)

    def shapes(q, k, v, table, to_global, *rest) -> tuple:
        biases = [q.new_empty(0) if b is None else torch.empty_like(b) for b in (table, to_global)]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *biases

    operator = torch.library.custom_op(name, compute, mutates_args=())
    operator.register_fake(shapes)
    _count_products(name, 5, backward)
    return operator


def _count_products(name: str, products: int, direction: str) -> None:
    """FLOPs of so many products of every query with every key that it meets."""

    def flops(q_shape: Sequence[int], *rest, **kwargs) -> int:
        numbers = next(x for x in rest if isinstance(x, list | tuple) and len(x) > 6)
        facts = CallSpec.of(numbers, 1.0)
        batch, heads, _, dim = q_shape
        around = int(facts.window.cyclic)
        if direction == "blocked":
            around = chunks_around(facts.window, batch * heads)
        return 2 * products * batch * heads * dim * met(facts, around)

    namespace, operator = name.split("::")
    register_flop_formula(getattr(getattr(torch.ops, namespace), operator))(flops)


def met(facts: CallSpec, around: int) -> int:
    """Pairs of a query and a key that are multiplied, padding of chunks included; `around` is that
    of `cuts`."""
    tile = facts.window.tile
    return sum(
        cut.groups * cut.queries * tile * (facts.num_global + len(cut.keys) * tile)
        for cut in cuts(facts.window, around)
    )
