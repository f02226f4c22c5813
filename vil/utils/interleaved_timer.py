"""Time functions (candidates) alternately, so that a slow phase of the machine affects all of them.

A warm-up drops candidates that are much too slow. Candidates that are slow in the first round run
only in some of the later rounds. Times include launch and execution of device kernels.
torch.utils.benchmark.Timer is not used, because it repeats a single statement.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vil.utils.errors import one_line
from vil.utils.timing import peak_tensor_bytes, seconds

MILLI = 1e3


class Limits(NamedTuple):
    """Thresholds above which a candidate runs in fewer rounds ("slow") or is dropped ("too slow").

    slow, too_slow: thresholds as multiples of the fastest candidate's time. patience: a candidate
    that takes fewer seconds is neither. slow_rounds: a slow candidate runs in every slow_rounds-th
    round.
    """

    slow: float = 10.0
    too_slow: float = 60.0
    patience: float = 1.0
    slow_rounds: int = 3

    def seconds(self, first: Mapping[str, float], exempt: Iterable[str], times: float) -> float:
        """Return a time limit in seconds: `times` x the time of the fastest candidate, but at least
        `patience` seconds.

        first: {name of a candidate: its measured seconds}. exempt: names of candidates to ignore
        when the fastest one is determined.
        """
        fastest = min((first[name] for name in first if name not in exempt), default=math.inf)
        return max(self.patience, times * fastest)


@dataclass(frozen=True)
class Candidate:
    """A function to time, in a forward pass and a backward pass.

    forward: function that returns the output.
    backward: function from the output to the gradients; None to time only the forward pass.
    least: a lower bound of the seconds of both passes together.
    before: function that is called, untimed, before each timed call.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Sequence[Tensor]] | None = None
    least: float = 0.0
    before: Callable[[], Any] | None = None

    def time(self, device: torch.device) -> tuple[float, float]:
        """Return the seconds (forward, backward) of one call; backward is 0 without a backward
        pass."""
        if self.before is not None:
            self.before()
        outputs: list = []
        forward = seconds(lambda: outputs.append(self.forward()), device)
        if self.backward is None:
            return forward, 0.0
        return forward, seconds(lambda: self.backward(outputs[0]), device)


@dataclass
class Times:
    """Times of one candidate: seconds for each timed round, and medians in milliseconds."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    forward_ms = property(lambda self: statistics.median(self.forward) * MILLI)
    backward_ms = property(lambda self: statistics.median(self.backward) * MILLI)
    total_ms = property(lambda self: self.forward_ms + self.backward_ms)


def time_interleaved(
    candidates: Mapping[str, Candidate],
    rounds: int,
    device: torch.device,
    exempt: Iterable[str] = (),
    limits: Limits = Limits(),  # noqa: B008
) -> tuple[dict[str, Times], dict[str, str]]:
    """Time the candidates in interleaved rounds.

    candidates: {name: function to time}. rounds: number of rounds after the warm-up. exempt: names
    of candidates that are never dropped for their measured time. The multiples in `limits` refer to
    the fastest candidate that is not exempt. Returns (times, dropped): {name: Times} of the
    candidates that finish, and {name: reason} of all others.
    """
    names, dropped = warm_up(candidates, device, exempt, limits)
    times, slow = {name: Times() for name in names}, []
    for number in range(rounds):
        for name in list(times):
            if name in slow and number % limits.slow_rounds:
                continue
            try:
                forward, backward = candidates[name].time(device)
                times[name].forward.append(forward)
                times[name].backward.append(backward)
            except Exception as error:
                dropped[name] = one_line(error)
                del times[name]
        if number == 0:
            first = {name: each.forward[0] + each.backward[0] for name, each in times.items()}
            most = limits.seconds(first, exempt, limits.slow)
            slow = [name for name in first if first[name] > most]
    return times, dropped


def warm_up(
    candidates: Mapping[str, Candidate],
    device: torch.device,
    exempt: Iterable[str],
    limits: Limits,
) -> tuple[dict[str, float], dict[str, str]]:
    """Run the candidates to warm up, and drop those that fail or are too slow.

    A candidate does not run if even `Candidate.least`, a lower bound of its time, is too slow.
    exempt, limits: see `time_interleaved`. Returns (first, dropped): {name: seconds} of the
    remaining candidates, and {name: reason} of all others.
    """
    first, dropped = {}, {}
    more = f"over {limits.too_slow:.0f} times the fastest"
    for name in sorted(candidates, key=lambda name: candidates[name].least):
        least, most = candidates[name].least, limits.seconds(first, exempt, limits.too_slow)
        if least > most:
            dropped[name] = f"too slow: its matmuls alone need {least:.1f} s, {more}"
            continue
        try:
            first[name] = sum(candidates[name].time(device))
            if first[name] > most:  # the first call may have compiled: time a second one
                first[name] = sum(candidates[name].time(device))
        except Exception as error:
            first.pop(name, None)
            dropped[name] = one_line(error)
    most = limits.seconds(first, exempt, limits.too_slow)
    for name in [name for name in first if first[name] > most and name not in exempt]:
        dropped[name] = f"too slow: {first.pop(name):.1f} s, {more}"
    return first, dropped


def peak_bytes(candidate: Candidate, device: torch.device) -> tuple[int, int]:
    """Return (peak, extra) of a forward and backward pass: the peak tensor memory in bytes, and the
    peak minus the bytes of the output and the gradients.

    Gradients that are allocated after the peak are subtracted too, so `extra` may be too low.
    """
    results: list[Tensor] = []

    def run() -> None:
        out = candidate.forward()
        results.extend([out.detach(), *(candidate.backward(out) if candidate.backward else ())])

    peak = peak_tensor_bytes(run, device)
    return peak, max(0, peak - sum(tensor.nbytes for tensor in results))
