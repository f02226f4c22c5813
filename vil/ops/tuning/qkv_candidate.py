"""Functions that are timed to compare attention backends on a CPU.

The functions take one qkv tensor and return one output tensor, like an attention module. Most
backends then copy the gradients of q, k and v to the gradient of qkv, and the outputs of global and
local queries to the output. The time includes these copies, because some backends avoid them.

Shapes: B batch, C channels, L local tokens, G global tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.bias import LocalBias
from vil.ops.dispatch import BACKENDS
from vil.ops.qkv_attention import NATIVE, attend_qkv
from vil.ops.testing import describe_mismatch
from vil.ops.window import SELF_CHUNK, Mask, Window
from vil.utils.interleaved_timer import Candidate

SDPA = "masked_sdpa"  # the backend that calls torch's fused attention
Leaves = dict[str, Tensor]  # qkv (B, G+L, 3C), and the fields of a `LocalBias`


def is_joined(case: Case) -> bool:
    """Return whether a case is timed with one qkv tensor: on a CPU, without padding and dropout."""
    return case.device == "cpu" and not case.valid and not case.dropout


def make_leaves(case: Case, seed: int = 0) -> tuple[Leaves, Tensor]:
    """Return (leaves, cotangent): random qkv and biases, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    sizes, dim = (case.batch, case.num_global + case.window.length), case.heads * case.head_dim
    shapes = {"cotangent": (*sizes, dim), "qkv": (*sizes, 3 * dim)}
    if case.table_bias:
        shapes["table"] = (case.heads, case.window.table_entries)
    if case.global_bias:
        shapes["to_global"] = (case.heads, case.num_global)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    drawn = {name: x.to(case.dtype) for name, x in drawn.items()}
    cotangent = drawn.pop("cotangent")
    return {name: x.requires_grad_(case.needs_grad) for name, x in drawn.items()}, cotangent


def is_full(case: Case) -> bool:
    """Return whether every token attends to every token, and no bias is added."""
    biased = case.table_bias or case.global_bias
    return not case.is_layout and case.window.covers_grid and not biased


def attend_separately(name: str, case: Case, leaves: Leaves) -> Tensor:
    """Return the attention output (B, G+L, C), computed from separate tensors q, k and v.

    Local queries use the backend `name`, and global queries use torch's attention. Exception: if
    `name` is SDPA and `is_full(case)` is True, one call of torch's attention computes all queries.
    """
    qkv = leaves["qkv"].unflatten(2, (3, case.heads, case.head_dim))
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    num_global, scale = case.num_global, case.head_dim**-0.5
    if name == SDPA and is_full(case):
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    bias = LocalBias(leaves.get("table"), leaves.get("to_global"))
    settings = dict(num_global=num_global, bias=bias, valid_hw=None, scale=scale, dropout_p=0.0)
    out = BACKENDS[name].attend(q[:, :, num_global:], k, v, case.window, **settings)
    if num_global:
        first = F.scaled_dot_product_attention(q[:, :, :num_global], k, v, scale=scale)
        out = torch.cat([first, out], dim=2)
    return out.transpose(1, 2).flatten(2)


def attend_jointly(case: Case, leaves: Leaves) -> Tensor:
    """Return the attention output (B, G+L, C), computed by `vil.ops.qkv_attention.attend_qkv`."""
    window, num_global = case.window, case.num_global
    if is_full(case):
        tokens = num_global + window.length
        window, num_global = Window((1, tokens), tokens, Mask.CHUNKS, (SELF_CHUNK,)), 0
    return attend_qkv(
        leaves["qkv"],
        window,
        num_heads=case.heads,
        num_global=num_global,
        bias=LocalBias(leaves.get("table"), leaves.get("to_global")),
        scale=case.head_dim**-0.5,
    )


def find_joined_mismatch(case: Case) -> str:
    """Check the output and the gradients of `vil.ops.qkv_attention`.

    Returns a text that describes the first wrong tensor, or "" if all are correct. The reference is
    separate PyTorch operations in float64. The tolerance is a few times the error of the same
    operations in the dtype of `case`.
    """
    case = replace(case, needs_grad=True)
    leaves, cotangent = make_leaves(case)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}

    def results(attend: Callable[[Case, Leaves], Tensor], leaves: Leaves) -> list[Tensor]:
        out = attend(case, leaves)
        return [out, *torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))]

    separately = partial(attend_separately, "masked")
    wanted, plain = results(separately, exact), results(separately, leaves)
    found = results(attend_jointly, leaves)
    tensors = zip(("out", *leaves), wanted, plain, found)
    return describe_mismatch(tensors, case.dtype, 16 * torch.finfo(case.dtype).eps)


def qkv_candidate(name: str, case: Case, leaves: Leaves, cotangent: Tensor) -> Candidate:
    """Return the passes to time: the forward pass and, in training, the backward pass.

    name: a key of BACKENDS. leaves, cotangent: from `make_leaves`.
    """

    def forward() -> Tensor:
        with torch.set_grad_enabled(case.needs_grad):
            if name == NATIVE:
                return attend_jointly(case, leaves)
            return attend_separately(name, case, leaves)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(leaves.values()), cotangent, materialize_grads=True)

    def read_inputs() -> None:  # a model has just computed them, so they are in the cache
        leaves["qkv"].detach().sum(), cotangent.sum()

    return Candidate(forward, backward if case.needs_grad else None, before=read_inputs)
