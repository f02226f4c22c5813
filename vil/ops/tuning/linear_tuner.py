"""Find the fastest backend of a linear layer or an MLP for a shape by measuring all backends."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vil.ops.dispatch import CHOICES
from vil.ops.linear import Norm, linear_native, linear_torch
from vil.ops.linear_case import LINEAR, LINEAR_RESIDUAL, MLP, LinearCase
from vil.ops.mlp import (
    MlpWeights,
    norm_mlp_native,
    norm_mlp_torch,
)
from vil.ops.native import library
from vil.ops.testing import describe_mismatch
from vil.ops.tuning.tuner import ROUNDS, Trial, time_candidates
from vil.utils.errors import one_line
from vil.utils.interleaved_timer import Candidate

EPS = 1e-6
ALLOWED = 8 * torch.finfo(torch.float32).eps  # see `describe_mismatch`
CHECKED_TOKENS = 257  # so that the last block of tokens is incomplete in every backend


Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]  # (tokens, {name: weight}) -> output
MLPS = {"torch": norm_mlp_torch, "native": norm_mlp_native}
LINEARS = {"torch": linear_torch, "native": linear_native}


def backends(case: LinearCase) -> dict[str, Compute]:
    """Return {backend: function} for the layers of a case.

    Each function takes x and {name: weight}, and returns the output.
    """
    if case.kind == MLP:
        return {name: partial(_run_mlp, compute) for name, compute in MLPS.items()}
    return {name: partial(_run_linear, compute) for name, compute in LINEARS.items()}


def _run_mlp(compute: Callable, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return compute(x, MlpWeights(**weights), eps=EPS, residual=True)


def _run_linear(compute: Callable, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    w, norm = weights, None
    if "gain" in w:
        norm = Norm(w["gain"], w["shift"], EPS)
    return compute(x, w["weight"], w["bias"], norm=norm, residual=w.get("residual"))


def _shapes(case: LinearCase) -> Mapping[str, tuple[int, ...]]:
    """Return {name: shape} of the weights of a case, and of its residual if it has one."""
    dim, features = case.dim, case.features
    norm = {"gain": (dim,), "shift": (dim,)}
    if case.kind == MLP:
        first = {"weight1": (features, dim), "bias1": (features,)}
        return norm | first | {"weight2": (dim, features), "bias2": (dim,)}
    shapes = {"weight": (features, dim), "bias": (features,)}
    if "norm" in case.kind:
        shapes |= norm
    return shapes | ({"residual": (case.tokens, features)} if "residual" in case.kind else {})


def tune_linear(case: LinearCase, *, rounds: int = ROUNDS) -> list[Trial]:
    """Measure the backends on a case, and store the fastest one in CHOICES.

    rounds: how often each backend is timed. Returns usable backends, fastest first, then rejected
    ones with the reason.
    """
    reasons = {"torch": "", "native": reason_against_native(case)}
    x, weights, cotangent = make_tensors(case)
    candidates = {
        name: _candidate(compute, case, x, weights, cotangent)
        for name, compute in backends(case).items()
        if not reasons[name]
    }
    trials, failed = time_candidates(candidates, case.device, rounds)
    reasons |= failed
    trials.sort(key=lambda trial: trial.seconds)
    if trials:
        CHOICES[case.bucket()] = trials[0].name
    return trials + [Trial(name, reason) for name, reason in reasons.items() if reason]


def reason_against_native(case: LinearCase) -> str:
    """Return why the C++ backend is rejected for a case; "" if it is usable.

    It is rejected if it cannot run the case or if its results are wrong.
    """
    if reasons := case.unsupported() or library.prepare():
        return "; ".join(reasons)
    try:
        case = replace(case, tokens=min(case.tokens, CHECKED_TOKENS))
        text = _find_mismatch(case)
        return text and f"wrong: {text}"
    except RuntimeError as error:
        return f"failed: {one_line(error)}"


def make_tensors(case: LinearCase) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return random (x, {name: weight}, gradient of the output) for a case.

    The weights and the gradient are float32. x is float32 if a norm comes first. Otherwise, it has
    the dtype of the matmuls.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = case.dim if case.kind == MLP else case.features
    shapes = {"x": (case.tokens, case.dim), **_shapes(case), "cotangent": (case.tokens, outputs)}
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator).to(case.device)
        tensors[name] = drawn / shape[-1] ** 0.5 if name.startswith("weight") else drawn
    cotangent = tensors.pop("cotangent")
    if case.kind in (LINEAR, LINEAR_RESIDUAL):
        tensors["x"] = tensors["x"].to(case.dtype)  # like attention's output under autocast
    for tensor in tensors.values():
        tensor.requires_grad_(case.needs_grad)
    return tensors.pop("x"), tensors, cotangent


def _autocast(case: LinearCase) -> AbstractContextManager:
    half = case.dtype != torch.float32
    return torch.autocast(case.device, case.dtype if half else None, enabled=half)


def _candidate(
    compute: Compute, case: LinearCase, x: Tensor, weights: dict[str, Tensor], cotangent: Tensor
) -> Candidate:
    """Return the passes to time: a backend's forward pass and, in training, its backward pass."""

    def forward() -> Tensor:
        with torch.set_grad_enabled(case.needs_grad), _autocast(case):
            return compute(x, weights)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (x, *weights.values()), cotangent.to(out.dtype))

    return Candidate(forward, backward if case.needs_grad else None)


def _find_mismatch(case: LinearCase) -> str:
    """Describe the first wrong result of the C++ backend, or return "" if none is wrong.

    The output and the gradients are compared with float64 results. A tensor is wrong if its error
    is larger than a small multiple of the error of PyTorch's operators.
    """
    case = replace(case, device="cpu", needs_grad=True)
    x, weights, cotangent = make_tensors(case)
    names = ["out", "dx", *(f"d{name}" for name in weights)]

    def results(compute: Compute, x: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
        out = compute(x, weights)
        inputs = (x, *weights.values())
        return [out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]

    x_exact, *others = (t.detach().double().requires_grad_() for t in (x, *weights.values()))
    wanted = results(backends(case)["torch"], x_exact, dict(zip(weights, others)))
    with _autocast(case):
        plain, found = (results(compute, x, weights) for compute in backends(case).values())
    return describe_mismatch(zip(names, wanted, plain, found), case.dtype, ALLOWED)
