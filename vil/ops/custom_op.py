"""Build a backend from a forward pass and a backward pass that recomputes the scores.

The passes of all such backends have the same interface:

    forward(call) -> out, lse
    backward(call, out, lse, dout) -> dq, dk, dv, dtable or None, dto_global or None

out is (B, N, L, D). lse (B, N, L) is the log-sum-exp of the scores of each query, in float32
(float64 for float64 inputs), and -inf for a query without keys. If `call.needs_lse` is False, lse
may have any values.

Each backend is a custom torch operator with a FLOP formula. torch.compile and torch.export do
not trace into it.

Shapes: B batch, N heads, L tokens, D channels.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from vil.ops.bias import LocalBias
from vil.ops.call import Call, find_pattern, from_numbers, to_numbers
from vil.ops.layout import Layout
from vil.ops.operator_call import Context, call_operator
from vil.ops.window import Window
from vil.utils.precision import autocast_off

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? to_global, Tensor? valid_hw"
INPUTS += ", Tensor? neighbor"
NUM_INPUTS = 7
STATIC = "SymInt[] numbers, float scale"
FORWARD_STATIC = f"{STATIC}, bool needs_lse=True"


def declare_attention(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[[Call], Tensor]:
    """Declare the operators of a backend. Returns its function `run`, which takes a `Call` and
    returns the attention output.

    name: the backend, such as "blocked". forward, backward: its passes.
    """
    operator, shifted = (_declare_passes(name, forward, backward, s) for s in (False, True))

    def run(call: Call) -> Tensor:
        assert call.dropout_p == 0, "`unsupported` refuses dropout"
        tensors = (call.q, call.k, call.v, *call.bias, call.valid_hw, call.neighbor)
        needs_lse = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in tensors
        )
        numbers = to_numbers(call.window, call.num_global)
        chosen = operator if call.neighbor is None else shifted
        return call_operator(chosen, *tensors, numbers, call.scale, needs_lse)[0]

    return run


def _call(
    tensors: Sequence[Any], numbers: Sequence[int], scale: float, needs_lse: bool = True
) -> Call:
    """Rebuild the `Call` from the arguments of an operator.

    tensors: q, k, v, the two biases, valid_hw and neighbor. numbers: the list of `to_numbers`,
    which encodes the window.
    """
    q, k, v, table, to_global, valid_hw, neighbor = tensors
    window, num_global = from_numbers(numbers)
    bias = LocalBias(table, to_global)
    options = dict(needs_lse=needs_lse, neighbor=neighbor)
    return Call(q, k, v, window, num_global, bias, valid_hw, scale, **options).with_offsets()


def _new_lse(q: Tensor, needs_lse: bool) -> Tensor:
    """Return an uninitialized log-sum-exp (B, N, L), or an empty tensor if not `needs_lse`."""
    return q.new_empty(
        q.shape[:3] if needs_lse else 0, dtype=torch.promote_types(q.dtype, torch.float32)
    )


def _declare_passes(
    backend: str, run_forward: Callable, run_backward: Callable, is_shifted: bool
) -> CustomOpDef:
    """Declare the operator vil::<backend>, which returns (output, log-sum-exp), and its gradient.

    If the operator is called with needs_lse=False, the log-sum-exp is an empty tensor.
    is_shifted: declare vil::<backend>_shifted, which reads the value of `neighbor`. So
    torch.compile must leave it out of CUDA graphs.
    """
    name = f"vil::{backend}_shifted" if is_shifted else f"vil::{backend}"
    gradient = _declare_gradient(f"{name}_gradient", run_backward, is_shifted)

    def compute(*arguments) -> tuple[Tensor, Tensor]:
        call = _call(arguments[:NUM_INPUTS], *arguments[NUM_INPUTS:])
        out, lse = run_forward(call)
        return out, lse if call.needs_lse else _new_lse(call.q, needs_lse=False)

    def setup_context(ctx: Context, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.numbers, ctx.scale, _ = inputs
        ctx.pattern = find_pattern(ctx.numbers)  # kept, because the backward pass looks it up
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: Context, dout: Tensor, dlse: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise no_second_derivative(backend)
        saved = ctx.saved_tensors  # read once: gradient checkpointing allows no more
        grads = call_operator(gradient, *saved, dout, ctx.numbers, ctx.scale)
        biases = [None if bias is None else grad for bias, grad in zip(saved[3:5], grads[3:])]
        return *grads[:3], *biases, None, None, None, None, None

    def fake(
        q, k, v, table, to_global, valid_hw, neighbor, numbers, scale, needs_lse=True
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), _new_lse(q, needs_lse)

    schema = f"({INPUTS}, {FORWARD_STATIC}) -> (Tensor, Tensor)"
    operator = _declare(name, compute, schema, is_shifted)
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=setup_context)
    _register_flops(name, 2)
    return operator


def _declare(name: str, compute: Callable, schema: str, is_shifted: bool) -> CustomOpDef:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None) if is_shifted else None
    tags = {"tags": (tag,)} if tag else {}  # torch 2.6 has no such tag
    return torch.library.custom_op(name, compute, mutates_args=(), schema=schema, **tags)


def _declare_gradient(name: str, run_backward: Callable, is_shifted: bool) -> CustomOpDef:
    """Declare the operator `name`, which runs a backward pass.

    The operator returns the gradients of q, k, v, the bias table and the bias toward global tokens.
    The gradient of a missing bias is an empty tensor.
    """

    def compute(q: Tensor, *arguments) -> tuple[Tensor, ...]:
        *tensors, out, lse, dout, numbers, scale = arguments
        with autocast_off(q.device.type):
            grads = run_backward(_call((q, *tensors), numbers, scale), out, lse, dout)
        return tuple(q.new_empty(0) if grad is None else grad for grad in grads)

    def fake(q: Tensor, k: Tensor, v: Tensor, table: Tensor, to_global: Tensor, *rest) -> tuple:
        biases = [q.new_empty(0) if b is None else torch.empty_like(b) for b in (table, to_global)]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *biases

    returns = ", ".join(["Tensor"] * 5)
    schema = f"({INPUTS}, Tensor out, Tensor lse, Tensor dout, {STATIC}) -> ({returns})"
    operator = _declare(name, compute, schema, is_shifted)
    operator.register_fake(fake)
    _register_flops(name, 5)
    return operator


def no_second_derivative(backend: str) -> RuntimeError:
    """Return the error to raise if a backward pass is itself differentiated."""
    return RuntimeError(
        f"the attention backend {backend} has no second derivative: "
        "select the backend chunk_autograd, or for a pattern masked, inside "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def _register_flops(name: str, num_matmuls: int) -> None:
    """Register the FLOP formula of an operator.

    name: the operator, such as "vil::blocked". num_matmuls: number of matrix products in the
    operator, each with as many FLOPs as q @ k^T.
    """

    def flops(q_shape: Sequence[int], *rest, **kwargs) -> int:
        numbers = next(x for x in rest if isinstance(x, list | tuple) and len(x) > 5)
        window, num_global = from_numbers(numbers)
        batch, heads, _, dim = q_shape
        pairs = num_pairs(window, num_global)
        return 2 * num_matmuls * batch * heads * dim * pairs

    namespace, operator = name.split("::")
    register_flop_formula(getattr(getattr(torch.ops, namespace), operator))(flops)


def num_pairs(window: Window | Layout, num_global: int) -> int:
    """Count the query-key pairs whose scores are computed, for one head of one image.

    If any query of a query chunk attends to any key of a key chunk, all query-key pairs of the two
    chunks are counted, with the padding tokens of incomplete chunks. If patterns differ by head,
    the count is the mean over heads.
    """
    rows, cols = window.chunks
    if isinstance(window, Layout):
        queries = rows * cols * window.tile
        return round(queries * (num_global + window.density * queries))
    tile = prod(min(window.size, side) for side in window.grid)
    chunk_pairs = sum(
        rows * cols if window.cyclic else max(0, rows - abs(dx)) * max(0, cols - abs(dy))
        for dx, dy in window.offsets
    )
    return rows * cols * tile * num_global + chunk_pairs * tile**2
