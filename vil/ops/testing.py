"""Random inputs, gradients and error bounds for tests, the tuner and benchmarks.

Shapes: B batch, N heads, L local tokens, G global tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vil.ops import reference
from vil.ops.attention_case import Case
from vil.ops.backends import masked
from vil.ops.bias import LocalBias
from vil.ops.call import Call
from vil.ops.dispatch import BACKENDS

# error bound, as a multiple of the rounding error of full attention in the same dtype
MULTIPLE = 4.0
# smallest bound, for cases in which full attention has almost no rounding error: another order of
# summation can cause errors of this size
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# largest difference between two backends, on grids that are too large for the reference
BACKEND_ULPS = {dtype: 128.0 if ulps > 4 else 16.0 for dtype, ulps in FLOOR_ULPS.items()}
CEILING_ULPS = 64.0  # largest bound


@dataclass(frozen=True)
class Inputs:
    """Random inputs of the forward and backward pass of `local_attention`, for tests.

    q (B, N, L, D), k and v (B, N, G+L, D). table, to_global: the fields of a `LocalBias`. cotangent
    (B, N, L, D): input of the backward pass, the gradient of a loss by the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    to_global: Tensor | None
    valid_hw: Tensor | None
    cotangent: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return a copy with the floating-point tensors converted to a dtype."""
        parts = {name: x for name, x in vars(self).items() if x is not None}
        return replace(self, **{n: x.to(dtype) for n, x in parts.items() if x.is_floating_point()})


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Sample inputs for a case from a standard normal distribution.

    seed: random seed. Equal seeds give equal inputs.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(case.dtype).to(case.device)

    window, lead = case.window, (case.batch, case.heads)
    valid_hw = None
    if case.valid:
        share = torch.rand(case.batch, 2, generator=generator)
        valid_hw = 1 + (share * torch.tensor(window.grid)).long()
        valid_hw[-1] = torch.tensor(window.grid)  # one image without padding
        valid_hw = valid_hw.clamp(max=torch.tensor(window.grid)).to(case.device)
    keys = case.num_global + window.length
    return Inputs(
        q=draw(*lead, window.length, case.head_dim),
        k=draw(*lead, keys, case.head_dim),
        v=draw(*lead, keys, case.head_dim),
        # a view of a parameter (entries, heads), as modules pass it
        table=draw(window.table_entries, case.heads).T if case.table_bias else None,
        to_global=draw(case.heads, case.num_global) if case.global_bias else None,
        valid_hw=valid_hw,
        cotangent=draw(*lead, window.length, case.head_dim),
    )


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """Return {name: copy} of q, k, v and the biases. The copies require gradients."""
    return {
        name: getattr(inputs, name).detach().clone().requires_grad_()
        for name in ("q", "k", "v", "table", "to_global")
        if getattr(inputs, name) is not None
    }


def forward(
    attend: Callable[..., Tensor], case: Case, inputs: Inputs, leaves: dict[str, Tensor]
) -> Tensor:
    """Run a backend, and return its output (B, N, L, D).

    attend: the backend's function. inputs: only the field `valid_hw` is used. leaves: q, k, v and
    the biases, from `leaves_of`.
    """
    bias, scale = LocalBias(leaves.get("table"), leaves.get("to_global")), case.head_dim**-0.5
    options = dict(num_global=case.num_global, bias=bias, valid_hw=inputs.valid_hw, scale=scale)
    q, k, v = (leaves[name] for name in "qkv")
    return attend(q, k, v, case.window, dropout_p=0.0, **options)


def run(attend: Callable[..., Tensor], case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Run a backend's function `attend`, and return its output and gradients as {name: tensor}.

    The output is named "out". The gradients are named "grad of q", "grad of k" and so on. They are
    omitted if `case.needs_grad` is False.
    """
    leaves = leaves_of(inputs)
    with torch.set_grad_enabled(case.needs_grad):
        out = forward(attend, case, inputs, leaves)
    if not case.needs_grad:
        return {"out": out}
    grads = torch.autograd.grad(
        out, list(leaves.values()), inputs.cotangent, materialize_grads=True
    )
    return {"out": out.detach(), **{f"grad of {name}": grad for name, grad in zip(leaves, grads)}}


def _eager(*args: Any, **options: Any) -> Tensor:
    """Compute full attention with plain operations, as the backend `masked` does."""
    return masked.run_eager(Call(*args, **options))


def errors(case: Case, names: Iterable[str], seed: int = 0) -> dict[str, tuple[float, float]]:
    """Compare backends with the reference in float64. Returns {"backend, tensor": (error, bound)}.

    A key is, for example, "masked, grad of q": a backend, and a tensor as named by `run`. error:
    the `distance` to the reference. bound: MULTIPLE times the rounding error of full attention in
    the same dtype, but at least FLOOR_ULPS and at most CEILING_ULPS. names: keys of BACKENDS.
    """
    inputs = make_inputs(case, seed)
    truth = run(reference.attend, case, inputs.to(torch.float64))
    eager = reference.attend if masked.unsupported(case) else _eager
    rounding = run(eager, case, inputs) if case.dtype != torch.float64 else truth
    floor = FLOOR_ULPS[case.dtype] * torch.finfo(case.dtype).eps
    ceiling = CEILING_ULPS * torch.finfo(case.dtype).eps
    bounds = {
        key: min(ceiling, max(floor, MULTIPLE * distance(rounding[key], truth[key])))
        for key in truth
    }
    results = {name: run(BACKENDS[name].attend, case, inputs) for name in names}
    return {
        f"{name}, {key}": (distance(tensors[key], truth[key]), bounds[key])
        for name, tensors in results.items()
        for key in truth
    }


def differences(case: Case, name: str, other: str) -> dict[str, tuple[float, float]]:
    """Compare two backends on a case. Returns {tensor: (difference, allowed difference)}.

    A tensor is the output or a gradient, as named by `run`. name, other: keys of BACKENDS.
    """
    inputs = make_inputs(case)
    first, second = (run(BACKENDS[backend].attend, case, inputs) for backend in (name, other))
    bound = BACKEND_ULPS[case.dtype] * torch.finfo(case.dtype).eps
    return {key: (distance(first[key], second[key]), bound) for key in second}


def distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / max(|b|, 1) with Euclidean norms; infinity if a is not finite."""
    value = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0)
    return value.item() if value.isfinite() else float("inf")


def describe_mismatch(
    results: Iterable[tuple[str, Tensor, Tensor, Tensor]], dtype: torch.dtype, allowed: float
) -> str:
    """Describe the first wrong tensor, or return "" if none is wrong.

    results: for each tensor, its name, its exact value, and the values that PyTorch's operators and
    a backend computed in `dtype`. The backend's error may be a few times that of PyTorch's
    operators, plus `allowed`, which is relative to the largest exact value.
    """
    for name, *values in results:
        right, near, value = (x.detach() for x in values)
        error = float((value - right).abs().max())
        bound = 4 * float((near - right).abs().max()) + allowed * float(right.abs().max())
        if not error <= bound:
            return f"{name} is off by {error:.1e} (bound {bound:.1e}, {dtype})"
    return ""
