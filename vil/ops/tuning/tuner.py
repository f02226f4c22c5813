"""Find the fastest backend for an attention call by measuring all backends.

Forward and backward passes are timed on the actual shape, or on some images of a large batch. A
backend is rejected, with a reason, if it does not support the call, if it needs too much memory, or
if its output or a gradient is wrong. Backends are measured only by the command `vil tune` and, with
the config key TUNE, at the start of a run.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vil.ops import testing
from vil.ops.attention_case import Case
from vil.ops.dispatch import BACKENDS, CHOICES
from vil.ops.layout import Layout
from vil.utils.errors import one_line
from vil.utils.interleaved_timer import Candidate, Limits, peak_bytes, time_interleaved
from vil.utils.lookup import lookup
from vil.utils.machine import free_bytes
from vil.utils.memory import fake_memory

ROUNDS = 7
FREE_SHARE = 0.5  # share of the free memory that a backend may allocate
# a backend that takes more than 4 times as long as the fastest is timed only once
LIMITS = Limits(slow=4.0, too_slow=math.inf, patience=0.0, slow_rounds=1000)
# backends that use autograd; on the full grid, the others are compared with one of them
PLAIN = ("chunk_autograd", "masked")
MAX_SCORES = {"cpu": 2e7, "cuda": 4e9}  # largest number of scores in a timed call
CHECKED_IMAGES = 2  # images of a comparison on the full grid


@dataclass(frozen=True)
class Trial:
    """The result of measuring one backend.

    name: the backend. reason: why it was rejected, or "".
    forward, backward: seconds of each pass. bytes: peak memory.
    """

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
    max_bytes: float | None = None,
) -> list[Trial]:
    """Measure backends, and store the fastest in CHOICES, the dict of selected backends.

    names: keys of BACKENDS, by default all.
    rounds: how often a backend is timed (a slow one only once, see LIMITS).
    max_bytes: memory limit for each backend, by default half of the free memory.
    Only some images of a large batch are timed. Returns usable backends, fastest first, then
    rejected ones with the reason. Raises ValueError for an unknown name or device.
    """
    lookup(MAX_SCORES, case.device, "device to measure on")
    names = list(BACKENDS) if names is None else list(dict.fromkeys(names))
    for name in names:
        lookup(BACKENDS, name, "backend")
    trial_case = replace(case, batch=timed_batch(case))
    max_bytes = spare_bytes(case) if max_bytes is None else max_bytes
    with full_precision_matmuls():
        reasons = {name: reason_against(name, case, trial_case, max_bytes) for name in names}
    usable = [name for name in names if not reasons[name]]
    candidates = make_candidates(usable, trial_case)
    trials, failed = time_candidates(candidates, case.device, rounds)
    reasons |= failed
    trials.sort(key=lambda trial: trial.seconds)
    if trials:
        CHOICES[case.bucket()] = trials[0].name
    return trials + [Trial(name, reasons[name]) for name in names if reasons[name]]


def spare_bytes(case: Case) -> float:
    """Return the memory that each backend may use by default: half of the device's free memory."""
    return FREE_SHARE * free_bytes(torch.device(case.device))


def listing(trials: list[Trial]) -> list[str]:
    """Format results as the lines of a table, one for each backend.

    A line has the milliseconds of each pass and the peak memory in MiB, or the reason why the
    backend was rejected.
    """
    lines = [f"  {'candidate':16} {'ms forward':>11} {'ms backward':>12} {'MiB':>9}"]
    for rank, trial in enumerate(trials):
        result = f"{1e3 * trial.forward:11.2f} {1e3 * trial.backward:12.2f}"
        result += f" {trial.bytes / 2**20:9.1f}{'' if rank else '   <- chosen'}"
        lines.append(f"  {trial.name:16} {trial.reason or result}")
    return lines


def timed_batch(case: Case) -> int:
    """Return how many images of the batch to time.

    This is the largest number of images with at most MAX_SCORES attention scores in total, but at
    least 1 and at most the batch size.
    """
    window = case.window
    if isinstance(window, Layout):
        keys = window.density * window.length
    else:
        keys = len(window.offsets) * window.tile
    scores = max(1, case.heads * window.length * (case.num_global + keys))
    return max(1, min(case.batch, int(MAX_SCORES[case.device] // scores)))


@contextmanager
def full_precision_matmuls() -> Iterator[None]:
    """Context manager that disables TF32, whose rounding would make correct backends look wrong."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reason_against(name: str, case: Case, trial_case: Case, max_bytes: float) -> str:
    """Return why a backend is rejected; "" if it is not.

    name: a key of BACKENDS.
    trial_case: the case with fewer images, on which the results of the backend are checked.
    max_bytes: memory limit for the backend.
    """
    if reasons := BACKENDS[name].reasons_against(case):
        return "; ".join(reasons)
    try:
        if (size := expected_bytes(name, case)) > max_bytes:
            return f"needs {size / 2**20:.0f} MiB, the limit is {max_bytes / 2**20:.0f} MiB"
        return find_mismatch(name, trial_case)
    except Exception as error:  # a user's backend may raise anything
        return f"failed: {one_line(error)}"


def expected_bytes(name: str, case: Case) -> int:
    """Estimate the peak memory of the forward and backward pass in bytes, without the inputs.

    The passes run on fake tensors. Returns 0, for unknown, if the backend does not support
    them.
    """
    try:
        with fake_memory() as memory:
            inputs = testing.make_inputs(case)
            before = memory.now
            testing.run(BACKENDS[name].attend, case, inputs)
            return memory.peak - before
    except Exception:  # a user's backend may not support fake tensors
        return 0


def find_mismatch(name: str, case: Case) -> str:
    """Describe how a backend's results differ from the reference or from a simple backend.

    Returns "" if they agree, within the bounds of `vil.ops.testing`.
    """
    # fp32 too: the rounding of half precision would hide small errors
    small = [shrink(case, dtype) for dtype in dict.fromkeys((case.dtype, torch.float32))]
    small = list(filter(None, small))
    usable = [few for few in small if not BACKENDS[name].unsupported(few)]
    if small and not usable:
        reasons = "; ".join(BACKENDS[name].unsupported(small[0]))
        return f"cannot be checked on a small grid: {reasons}"
    for few in usable:
        for key, (error, bound) in testing.errors(few, [name]).items():
            if not error <= bound:
                key = key.removeprefix(f"{name}, ")
                return f"wrong: {key} is off by {error:.1e} (bound {bound:.1e}, {few.dtype})"
    full = replace(case, batch=min(case.batch, CHECKED_IMAGES))
    plains = [plain for plain in PLAIN if not BACKENDS[plain].unsupported(full)]
    plain = next((p for p in plains if expected_bytes(p, full) <= spare_bytes(full)), None)
    checked = {} if plain is None or name in PLAIN else testing.differences(full, name, plain)
    for key, (error, bound) in checked.items():
        if not error <= bound:
            text = f"{key} differs from {plain} by {error:.1e} (bound {bound:.1e})"
            return f"wrong on the full grid: {text}"
    return ""


def shrink(case: Case, dtype: torch.dtype) -> Case | None:
    """Return a small version of a case, on which the slow reference can run.

    It has one image, and a small grid with incomplete chunks at the ends. It has two heads or, if
    the attention pattern differs by head, all heads. Returns None if the pattern is not defined on
    the small grid, for example if it is a mask with the size of the full grid.
    """
    window = case.window
    rows, cols = (min(chunks, 3) * window.size - window.size // 2 for chunks in window.chunks)
    heads = case.heads if isinstance(window, Layout) and window.heads > 1 else 2
    try:
        window = replace(window, grid=(rows, cols))
    except ValueError:
        return None
    return replace(case, window=window, batch=1, heads=heads, dtype=dtype, dropout=False)


def time_candidates(
    candidates: dict[str, Candidate], device: str, rounds: int
) -> tuple[list[Trial], dict[str, str]]:
    """Time backends in turn, and return their results and the reasons for failures.

    candidates: {backend: passes to time}. rounds: how often a backend is timed (a slow one only
    once, see LIMITS). The results are Trials with median times. The reasons are {name: reason} for
    the backends that failed.
    """
    measured_on = torch.device(device)
    times, failed = time_interleaved(candidates, rounds, measured_on, limits=LIMITS)
    trials = []
    for name, measured in times.items():
        try:
            forward, backward = map(statistics.median, (measured.forward, measured.backward))
            peak, _ = peak_bytes(candidates[name], measured_on)
            trials.append(Trial(name, "", forward, backward, peak))
        except Exception as error:
            failed[name] = one_line(error)
    return trials, {name: f"failed: {reason}" for name, reason in failed.items()}


def make_candidates(names: list[str], case: Case) -> dict[str, Candidate]:
    """Return {backend: passes to time}. All backends get the same inputs."""
    inputs = testing.make_inputs(case)
    leaves = testing.leaves_of(inputs)
    return {name: backend_candidate(name, case, inputs, leaves) for name in names}


def backend_candidate(
    name: str, case: Case, inputs: testing.Inputs, leaves: dict[str, Tensor]
) -> Candidate:
    """Return the passes to time: a backend's forward pass and, in training, its backward pass.

    leaves: q, k, v and the biases, from `testing.leaves_of(inputs)`.
    """

    def forward() -> Tensor:
        with torch.set_grad_enabled(case.needs_grad):
            return testing.forward(BACKENDS[name].attend, case, inputs, leaves)

    def backward(out: Tensor) -> Sequence[Tensor]:
        tensors = list(leaves.values())
        return torch.autograd.grad(out, tensors, inputs.cotangent, materialize_grads=True)

    return Candidate(forward, backward if case.needs_grad else None)
