"""Find the fastest backend of `vil.ops.mlp.norm_mlp` for a shape by measuring all backends."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from vil.ops.dispatch import CHOICES
from vil.ops.mlp import MlpCase, MlpWeights, norm_mlp_native, norm_mlp_torch
from vil.ops.native import library
from vil.ops.tuning.tuner import LIMITS, ROUNDS, Trial
from vil.utils.errors import one_line
from vil.utils.interleaved_timer import Candidate, peak_bytes, time_interleaved

BACKENDS = {"torch": norm_mlp_torch, "native": norm_mlp_native}
EPS = 1e-6
CHECKED_TOKENS = 257  # an incomplete block in every backend


def tune_mlp(case: MlpCase, *, rounds: int = ROUNDS) -> list[Trial]:
    """Measure the backends of `norm_mlp` on a case, and store the fastest one in CHOICES.

    rounds: how often each backend is timed. Returns usable backends, fastest first, then rejected
    backends with the reason.
    """
    reasons = {"torch": "", "native": reason_against_native(case)}
    x, weights, cotangent = make_tensors(case)
    candidates = {
        name: _candidate(compute, case, x, weights, cotangent)
        for name, compute in BACKENDS.items()
        if not reasons[name]
    }
    device = torch.device(case.device)
    times, failed = time_interleaved(candidates, rounds, device, limits=LIMITS)
    trials = []
    for name, measured in times.items():
        passes = (statistics.median(column) for column in (measured.forward, measured.backward))
        trials.append(Trial(name, "", *passes, peak_bytes(candidates[name], device)[0]))
    reasons |= {name: f"failed: {reason}" for name, reason in failed.items()}
    trials.sort(key=lambda trial: trial.seconds)
    if trials:
        CHOICES[case.bucket()] = trials[0].name
    return trials + [Trial(name, reason) for name, reason in reasons.items() if reason]


def reason_against_native(case: MlpCase) -> str:
    """Return why the C++ backend is rejected for a case; "" if it is usable.

    It is rejected if it cannot run the case or if its results are wrong.
    """
    if reasons := case.unsupported() or library.prepare():
        return "; ".join(reasons)
    try:
        return _find_mismatch(replace(case, tokens=min(case.tokens, CHECKED_TOKENS)))
    except RuntimeError as error:
        return f"failed: {one_line(error)}"


def make_tensors(case: MlpCase) -> tuple[Tensor, MlpWeights, Tensor]:
    """Return random (x, weights, gradient of the output) for a case.

    All are in float32, because a model's tokens are float32 under autocast too.
    """
    generator = torch.Generator().manual_seed(0)
    dim, hidden = case.dim, case.hidden
    sizes = ((dim,), (dim,), (hidden, dim), (hidden,), (dim, hidden), (dim,))
    shapes = ((case.tokens, dim), *sizes, (case.tokens, dim))
    x, *weights, cotangent = (torch.randn(shape, generator=generator) for shape in shapes)
    weights = (w / w.shape[-1] ** 0.5 if w.ndim == 2 else w for w in weights)
    x, *weights = (t.to(case.device).requires_grad_(case.needs_grad) for t in (x, *weights))
    return x, MlpWeights(*weights), cotangent.to(case.device)


def _autocast(case: MlpCase) -> AbstractContextManager:
    half = case.dtype != torch.float32
    return torch.autocast(case.device, case.dtype if half else None, enabled=half)


def _candidate(
    compute: Callable, case: MlpCase, x: Tensor, weights: MlpWeights, cotangent: Tensor
) -> Candidate:
    """Return the passes to time: a backend's forward pass and, in training, its backward pass."""

    def forward() -> Tensor:
        with torch.set_grad_enabled(case.needs_grad), _autocast(case):
            return compute(x, weights, eps=EPS, residual=True)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (x, *weights), cotangent)

    return Candidate(forward, backward if case.needs_grad else None)


def _find_mismatch(case: MlpCase) -> str:
    """Compare the C++ backend with float64, and describe the first wrong tensor; "" if none is.

    The tensors are the output and the gradients. A tensor is wrong if its error is larger than a
    small multiple of the error of PyTorch's operators.
    """
    case = replace(case, device="cpu", needs_grad=True)
    x, weights, cotangent = make_tensors(case)
    names = ["out", "dx", *(f"d{name}" for name in weights._fields)]

    def results(compute: Callable, x: Tensor, weights: MlpWeights) -> list[Tensor]:
        out = compute(x, weights, eps=EPS, residual=True)
        return [out, *torch.autograd.grad(out, (x, *weights), cotangent.to(out.dtype))]

    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    wanted = results(norm_mlp_torch, exact[0], MlpWeights(*exact[1:]))
    with _autocast(case):
        plain, found = (results(compute, x, weights) for compute in BACKENDS.values())
    for name, right, near, value in zip(names, wanted, plain, found):
        error = float((value.detach() - right.detach()).abs().max())
        bound = 4 * float((near.detach() - right.detach()).abs().max())
        bound += 8 * torch.finfo(torch.float32).eps * float(right.detach().abs().max())
        if not error <= bound:
            return f"wrong: {name} is off by {error:.1e} (bound {bound:.1e}, {case.dtype})"
    return ""
