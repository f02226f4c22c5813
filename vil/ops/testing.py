"""Made-up inputs, gradients and error bounds, shared by tests, tuner and benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vil.ops import reference
from vil.ops.attention_case import Case
from vil.ops.bias import LocalBias
from vil.ops.dispatch import BACKENDS

MULTIPLE = 4.0  # of the error that the type's own rounding makes on the same inputs
# where plain attention happens to round nearly nothing, the order of a sum alone may cost this much
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# between two backends, on grids that are too large for the definition
APART_ULPS = {torch.float64: 128.0, torch.float32: 128.0, torch.bfloat16: 16.0, torch.float16: 16.0}
CEILING_ULPS = 64.0  # and never more, whatever error plain attention makes


@dataclass(frozen=True)
class Inputs:
    """q, cotangent (B, N, L, D), k, v (B, N, G+L, D), both bias parts, valid (B, 2)."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    to_global: Tensor | None
    valid: Tensor | None
    cotangent: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another floating-point type."""
        return replace(
            self,
            **{
                name: t.to(dtype)
                for name, t in vars(self).items()
                if t is not None and t.is_floating_point()
            },
        )


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs of a case, of unit size, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (
            torch.randn(shape, generator=source, dtype=torch.float64).to(case.dtype).to(case.device)
        )

    window, lead = case.window, (case.batch, case.heads)
    valid = None
    if case.valid:
        share = torch.rand(case.batch, 2, generator=source)
        valid = 1 + (share * torch.tensor(window.grid)).long()
        valid[-1] = torch.tensor(window.grid)  # one image without padding
        valid = valid.clamp(max=torch.tensor(window.grid)).to(case.device)
    keys = case.num_global + window.length
    return Inputs(
        q=draw(*lead, window.length, case.head_dim),
        k=draw(*lead, keys, case.head_dim),
        v=draw(*lead, keys, case.head_dim),
        table=draw(case.heads, (4 * window.size - 1) ** 2) if case.table_bias else None,
        to_global=draw(case.heads, case.num_global) if case.global_bias else None,
        valid=valid,
        cotangent=draw(*lead, window.length, case.head_dim),
    )


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """Copies of what has a gradient: q, k, v and the bias parts that are there."""
    return {
        name: getattr(inputs, name).detach().clone().requires_grad_()
        for name in ("q", "k", "v", "table", "to_global")
        if getattr(inputs, name) is not None
    }


def forward(
    attend: Callable[..., Tensor], case: Case, inputs: Inputs, leaves: dict[str, Tensor]
) -> Tensor:
    """The output (B, N, L, D) for `leaves`."""
    return attend(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        case.window,
        num_global=case.num_global,
        bias=LocalBias(leaves.get("table"), leaves.get("to_global")),
        valid=inputs.valid,
        scale=case.head_dim**-0.5,
        dropout_p=0.0,
    )


def run(attend: Callable[..., Tensor], case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """The output by name and, if the case wants them, the gradients of q, k, v and both biases."""
    leaves = leaves_of(inputs)
    with torch.set_grad_enabled(case.needs_grad):
        out = forward(attend, case, inputs, leaves)
    if not case.needs_grad:
        return {"out": out}
    grads = torch.autograd.grad(
        out, list(leaves.values()), inputs.cotangent, materialize_grads=True
    )
    return {"out": out.detach(), **{f"grad of {name}": grad for name, grad in zip(leaves, grads)}}


def errors(case: Case, names: Iterable[str], seed: int = 0) -> dict[str, tuple[float, float]]:
    """By backend and tensor, the error against the fp64 definition and the bound for it.

    The bound is a small multiple of the error that plain `masked` attention, or the definition
    itself where that cannot run, makes in the case's type on the same inputs; never below a few
    units in the last place.
    """
    inputs = make_inputs(case, seed)
    truth = run(reference.attend, case, inputs.to(torch.float64))
    plain = BACKENDS["masked"]
    eager = reference.attend if plain.unsupported(case) else plain.attend
    rounding = run(eager, case, inputs) if case.dtype != torch.float64 else truth
    floor = FLOOR_ULPS[case.dtype] * torch.finfo(case.dtype).eps
    ceiling = CEILING_ULPS * torch.finfo(case.dtype).eps
    bounds = {
        key: min(ceiling, max(floor, MULTIPLE * distance(rounding[key], truth[key])))
        for key in truth
    }
    found = {name: run(BACKENDS[name].attend, case, inputs) for name in names}
    return {
        f"{name}, {key}": (distance(tensors[key], truth[key]), bounds[key])
        for name, tensors in found.items()
        for key in truth
    }


def differences(case: Case, name: str, other: str) -> dict[str, tuple[float, float]]:
    """By tensor, how far one backend is from another, and how far two roundings may lie apart."""
    inputs = make_inputs(case)
    mine, theirs = (run(BACKENDS[backend].attend, case, inputs) for backend in (name, other))
    bound = APART_ULPS[case.dtype] * torch.finfo(case.dtype).eps
    return {key: (distance(mine[key], theirs[key]), bound) for key in theirs}


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over that of b, or over 1; infinite where a is not finite."""
    value = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0)
    return value.item() if value.isfinite() else float("inf")
