"""Sliding chunks (arXiv:2103.15358, section 3.2): matmuls of each chunk with its neighbors.

Neighbors are aligned with their chunk by rolling the tensor of all chunks. `chunk_autograd` stores
all rolled copies of k and v for the backward pass. `chunk_handgrad` stores only q, k, v and the
attention weights, and rolls k and v again.

Shapes: B batch, N heads, L tokens, R x C chunks of W tokens, K neighbors of a chunk (including
itself), G global tokens, D channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function

from vil.ops.backends.chunk_layout import (
    Offsets,
    attend_jointly,
    from_chunks,
    roll_neighbors,
    sum_neighbors,
    to_chunks,
)
from vil.ops.bias import tile_bias
from vil.ops.call import Call
from vil.ops.operator_call import Context
from vil.ops.window import Window

Product = Callable[[Tensor, Tensor, Offsets], Tensor]


def scores_autograd(q: Tensor, k: Tensor, offsets: Offsets) -> Tensor:
    """Multiply the queries of each chunk with the keys of its K neighbor chunks.

    q, k (B, N, R, C, W, D): R x C chunks of W tokens. offsets: K displacements (rows, columns) to
    the neighbors, in chunks. Returns (B, N, R, C, W, K*W).
    """
    return torch.cat([q @ near.mT for near in roll_neighbors(k, offsets)], dim=-1)


def values_autograd(weights: Tensor, v: Tensor, offsets: Offsets) -> Tensor:
    """Multiply attention weights (B, N, R, C, W, K*W) with the values of K neighbor chunks.

    v and the result are (B, N, R, C, W, D): R x C chunks of W tokens. offsets: see
    `scores_autograd`.
    """
    parts = weights.chunk(len(offsets), dim=-1)
    # pyrefly: ignore[bad-return]  # not the 0 of an empty sum
    return sum(part @ near for part, near in zip(parts, roll_neighbors(v, offsets)))


class HandMatmul(Function):
    """Autograd function that computes `scores_autograd` or `values_autograd` with less memory.

    It saves only the two input tensors, such as q and k. It does not save the rolled copies of k or
    v, because the backward pass rolls k or v again.
    """

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, offsets: Offsets, scores: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.offsets, ctx.scores = offsets, scores
        return (scores_autograd if scores else values_autograd)(a, b, offsets)

    @staticmethod
    # pyrefly: ignore[bad-override]  # there is one output
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():  # instead of returning a wrong second derivative
            raise RuntimeError(
                "the attention backend chunk_handgrad has no second derivative: "
                "select the backend chunk_autograd"
            )
        a, b = ctx.saved_tensors
        grad_a = (values_autograd if ctx.scores else scores_autograd)(grad, b, ctx.offsets)
        wide, narrow = (grad, a) if ctx.scores else (a, grad)
        parts = wide.chunk(len(ctx.offsets), dim=-1)
        grad_b = sum_neighbors((part.mT @ narrow for part in parts), ctx.offsets)
        return grad_a, grad_b, None, None


def run_autograd(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` with autograd, which stores rolled copies of k and v."""
    return _run(call, scores_autograd, values_autograd)


def run_handgrad(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` with `HandMatmul`, which has no second derivative."""
    return _run(
        call,
        lambda q, k, offsets: HandMatmul.apply(q, k, offsets, True),
        lambda weights, v, offsets: HandMatmul.apply(weights, v, offsets, False),
    )


def _run(call: Call, scores: Product, values: Product) -> Tensor:
    window: Window = call.window  # pyrefly: ignore[bad-assignment]  # the registry refuses layouts
    lengths = [call.num_global, window.length]
    q = to_chunks(call.q * call.scale, window)
    k_global, k_local = call.k.split(lengths, dim=2)
    v_global, v_local = call.v.split(lengths, dim=2)
    first = call._replace(q=q, k=k_global, v=v_global)
    logits = scores(q, to_chunks(k_local, window), window.offsets)  # (B, N, R, C, W, K*W)
    table = tile_bias(call.bias, window)
    if table is not None:
        logits = logits + table[:, None, None]
    visible = window.visible(call.valid_hw, q.device)[:, None]

    def weigh(weights: Tensor) -> Tensor:
        return values(weights, to_chunks(v_local, window), window.offsets)

    out = attend_jointly(first, logits, visible, weigh)
    return from_chunks(out, window)
