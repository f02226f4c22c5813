"""Time candidates in turns, so that a slow moment of the machine affects all of them.

Every round runs each candidate once. A warm-up decides which ones are too slow to take part, the
first round which ones are too slow for every round. torch.utils.benchmark.Timer cannot interleave:
it repeats one statement until it is done. Times include what a call starts on the device, and its
launch.
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
    """When a candidate is slow. `slow`, `too_slow`: multiples of the fastest candidate's time."""

    slow: float = 10.0  # takes part in every third round
    too_slow: float = 60.0  # is dropped
    patience: float = 1.0  # seconds; a faster candidate is neither
    slow_rounds: int = 3  # the rounds between two of a slow candidate

    def seconds(self, first: Mapping[str, float], exempt: Iterable[str], times: float) -> float:
        """`times` the seconds of the fastest candidate that is not exempt, at least `patience`."""
        fastest = min((first[name] for name in first if name not in exempt), default=math.inf)
        return max(self.patience, times * fastest)


@dataclass(frozen=True)
class Candidate:
    """`forward` returns the output, from which `backward`, if there is one, returns the gradients.
    least: a lower bound of the seconds of both, if one is known before they run."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Sequence[Tensor]] | None = None
    least: float = 0.0

    def time(self, device: torch.device) -> tuple[float, float]:
        """Seconds of one forward pass and of its backward pass."""
        outputs: list = []
        forward = seconds(lambda: outputs.append(self.forward()), device)
        if self.backward is None:
            return forward, 0.0
        return forward, seconds(lambda: self.backward(outputs[0]), device)


@dataclass
class Times:
    """Seconds of each timed round, and the medians in milliseconds."""

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
    """The times of the candidates that finish, and the reasons why the others do not.

    exempt: names that are never too slow, and that the others are not compared with.
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
    """Seconds of one call of each candidate that is fast enough, and reasons against the others.
    Candidates with a known lower bound run last, and not at all if it is too high."""
    first, dropped = {}, {}
    more = f"over {limits.too_slow:.0f} times the fastest"
    for name in sorted(candidates, key=lambda name: candidates[name].least):
        least, most = candidates[name].least, limits.seconds(first, exempt, limits.too_slow)
        if least > most:
            dropped[name] = f"too slow: its products alone need {least:.1f} s, {more}"
            continue
        try:
            first[name] = sum(candidates[name].time(device))
            if first[name] > most:  # it may have compiled: the second call decides
                first[name] = sum(candidates[name].time(device))
        except Exception as error:
            first.pop(name, None)
            dropped[name] = one_line(error)
    most = limits.seconds(first, exempt, limits.too_slow)
    for name in [name for name in first if first[name] > most and name not in exempt]:
        dropped[name] = f"too slow: {first.pop(name):.1f} s, {more}"
    return first, dropped


def peak_bytes(candidate: Candidate, device: torch.device) -> tuple[int, int]:
    """Peak bytes of the tensors that one forward and backward pass allocate; the same without the
    output and the gradients, a lower bound if the peak comes before the last gradient."""
    results: list[Tensor] = []

    def run() -> None:
        out = candidate.forward()
        results.extend([out.detach(), *(candidate.backward(out) if candidate.backward else ())])

    peak = peak_tensor_bytes(run, device)
    return peak, max(0, peak - sum(tensor.nbytes for tensor in results))
