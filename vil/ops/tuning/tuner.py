"""Which backend is fastest for a case, found by trying: checked first, then timed.

The idea is that of the meta-optimizer of Theano's convolutions: try every implementation on the
very shape, forward and backward apart, and say of each how long it took or why it cannot run. A
command (`vil tune`) or the start of a run (TUNE) does it, never a forward pass.

A candidate is refused, with the reason, if it says itself that it cannot run, if its tensors would
not fit, if its output or a gradient is off the definition's on a small ragged grid, or off a plain
backend's on the whole grid. What is left is timed in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vil.ops import testing
from vil.ops.attention_case import Case
from vil.ops.backends import flex
from vil.ops.dispatch import BACKENDS, CHOICES
from vil.utils.errors import one_line
from vil.utils.lookup import lookup
from vil.utils.machine import free_bytes
from vil.utils.memory import reckoned
from vil.utils.timing import peak_tensor_bytes, seconds

ROUNDS = 7
FREE_SHARE = 0.5  # of the free memory that a candidate may take
HOPELESS = 4.0  # times the fastest in the first round: not timed again
PLAIN = ("chunk_autograd", "masked")  # by autograd alone, what others are compared with
MOST_SCORES = {"cpu": 2e7, "cuda": 4e9}  # of a timed call: larger batches take longer in proportion
TWO_IMAGES = 2  # are enough to compare whole grids


@dataclass(frozen=True)
class Trial:
    """A candidate: the reason why not, or seconds of each pass and bytes held at the most."""

    name: str
    reason: str = ""
    forward: float = 0.0
    backward: float = 0.0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def tune(
    case: Case,
    names: Iterable[str] | None = None,
    *,
    rounds: int = ROUNDS,
    most_bytes: float | None = None,
) -> list[Trial]:
    """Try the named backends (all, by default) on a case; the fastest becomes its bucket's choice.

    most_bytes: what a candidate may hold, by default half of the free memory. Returns the able,
    fastest first, then the others; with none able nothing changes. A large batch is timed with
    fewer images. Raises ValueError for an unknown name, and for devices that are not measured.
    """
    lookup(MOST_SCORES, case.device, "device to measure on")
    names = list(BACKENDS) if names is None else list(dict.fromkeys(names))
    for name in names:
        lookup(BACKENDS, name, "backend")
    trial_case = replace(case, batch=timed_batch(case))
    most_bytes = spare_bytes(case) if most_bytes is None else most_bytes
    with exact_products():
        reasons = {name: reason_against(name, case, trial_case, most_bytes) for name in names}
    able = [name for name in names if not reasons[name]]
    trials, failed = timed(able, trial_case, rounds)
    reasons |= failed
    trials.sort(key=lambda trial: trial.seconds)
    if trials:
        CHOICES[case.bucket()] = trials[0].name
    flex.forget()  # so that what was only tried does not count against the shapes it may compile
    return trials + [Trial(name, reasons[name]) for name in names if reasons[name]]


def spare_bytes(case: Case) -> float:
    """What a candidate may hold on the case's device."""
    return FREE_SHARE * free_bytes(torch.device(case.device))


def listing(trials: list[Trial]) -> list[str]:
    """A line per candidate: milliseconds of each pass and MiB held, or the reason why not."""
    lines = [f"  {'candidate':16} {'ms forward':>11} {'ms backward':>12} {'MiB':>9}"]
    for place, trial in enumerate(trials):
        figures = (
            f"{1e3 * trial.forward:11.2f} {1e3 * trial.backward:12.2f} {trial.bytes / 2**20:9.1f}"
            f"{'   <- chosen' if place == 0 else ''}"
        )
        lines.append(f"  {trial.name:16} {trial.reason or figures}")
    return lines


def timed_batch(case: Case) -> int:
    """As many of the images as have a number of scores that a call is timed with."""
    window = case.window
    scores = case.heads * window.length * (case.num_global + len(window.offsets) * window.tile)
    return max(1, min(case.batch, int(MOST_SCORES[case.device] // scores)))


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, float32 is multiplied as float32: TF32 would be taken for a mistake."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reason_against(name: str, case: Case, trial_case: Case, most_bytes: float) -> str:
    """Why a backend is no candidate for a case, of which `trial_case` has fewer images; empty if
    it is one."""
    if reasons := BACKENDS[name].unsupported(case):
        return "; ".join(reasons)
    try:
        if (size := expected_bytes(name, case)) > most_bytes:
            return f"would hold {size / 2**20:.0f} MiB, of {most_bytes / 2**20:.0f} it may"
        return disagreement(name, trial_case)
    except Exception as error:  # backends may be anyone's
        return f"failed: {one_line(error)}"


def expected_bytes(name: str, case: Case) -> int:
    """What forward and backward would hold beside the inputs, without computing them.

    0 where the backend cannot be followed without numbers; then running it must show.
    """
    if BACKENDS[name].compiles:
        return 0
    try:
        with reckoned() as held:
            inputs = testing.make_inputs(case)
            before = held.now
            testing.run(BACKENDS[name].attend, case, inputs)
            return held.peak - before
    except Exception:  # whatever a backend of another hand does without numbers
        return 0


def disagreement(name: str, case: Case) -> str:
    """How its results differ from the definition's in small, and from a plain backend's on the
    whole grid; empty if they do not."""
    # fp32 as well: the rounding of half precision would hide small mistakes
    small = [cut_down(case, dtype) for dtype in dict.fromkeys((case.dtype, torch.float32))]
    able = [few for few in small if not BACKENDS[name].unsupported(few)]
    if not able:
        return f"cannot be checked in small: {'; '.join(BACKENDS[name].unsupported(small[0]))}"
    for few in able:
        for what, (error, bound) in testing.errors(few, [name]).items():
            if not error <= bound:
                what = what.removeprefix(f"{name}, ")
                return f"wrong: {what} is off by {error:.1e} (bound {bound:.1e}, {few.dtype})"
    full = replace(case, batch=min(case.batch, TWO_IMAGES))
    plain = reference_for(full)
    if plain is None or name in PLAIN:
        return ""
    for what, (error, bound) in testing.differences(full, name, plain).items():
        if not error <= bound:
            return f"wrong on the whole grid: {what} is off {plain}'s by {error:.1e} ({bound:.1e})"
    return ""


def cut_down(case: Case, dtype: torch.dtype) -> Case:
    """The same case on a small ragged grid: B 1, N 2, at most two chunks and a half each way."""
    size = case.window.size
    grid = tuple(min(chunks, 3) * size - size // 2 for chunks in case.window.chunks)
    window = replace(case.window, grid=grid)
    return replace(case, window=window, batch=1, heads=2, dtype=dtype, dropout=False)


def reference_for(case: Case) -> str | None:
    """A plain backend that can run the whole grid, and whose tensors fit."""
    spare = spare_bytes(case)
    for name in PLAIN:
        if not BACKENDS[name].unsupported(case) and expected_bytes(name, case) <= spare:
            return name
    return None


def timed(names: list[str], case: Case, rounds: int) -> tuple[list[Trial], dict[str, str]]:
    """Medians of interleaved rounds, and why a backend failed after all (in memory, say).

    The first round follows one that warms up, and drops the hopeless.
    """
    inputs, device = testing.make_inputs(case), torch.device(case.device)
    leaves = testing.leaves_of(inputs)
    times: dict[str, list[tuple[float, float]]] = {}
    held, failed = {}, {}
    for name in names:
        attend = BACKENDS[name].attend
        try:
            one_pass(name, case, inputs, leaves, device)
            times[name] = [one_pass(name, case, inputs, leaves, device)]
            held[name] = peak_tensor_bytes(partial(testing.run, attend, case, inputs), device)
        except Exception as error:
            times.pop(name, None)
            failed[name] = f"failed: {one_line(error)}"
    best = min((sum(found[0]) for found in times.values()), default=0.0)
    for _ in range(rounds - 1):
        for name in [name for name in times if sum(times[name][0]) <= HOPELESS * best]:
            try:
                times[name].append(one_pass(name, case, inputs, leaves, device))
            except Exception as error:
                del times[name]
                failed[name] = f"failed: {one_line(error)}"
    trials = [
        Trial(name, "", *(statistics.median(times) for times in zip(*found)), held[name])
        for name, found in times.items()
    ]
    return trials, failed


def one_pass(
    name: str,
    case: Case,
    inputs: testing.Inputs,
    leaves: dict[str, Tensor],
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of one forward and, in training, of one backward pass."""
    kept: list[Tensor] = []

    def forward() -> None:
        with torch.set_grad_enabled(case.needs_grad):
            kept.append(testing.forward(BACKENDS[name].attend, case, inputs, leaves))

    def backward() -> None:
        torch.autograd.grad(kept[0], list(leaves.values()), inputs.cotangent, allow_unused=True)

    ahead = seconds(forward, device)
    return ahead, seconds(backward, device) if case.needs_grad else 0.0
