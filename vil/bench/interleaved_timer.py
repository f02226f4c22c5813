"""Candidates timed in turns, so that a slow moment of the machine meets them all.

Every round runs each candidate once; one round before them warms up, and decides who is too slow to
stay, or to take part in every round. Forward and backward are timed apart, each to the end of what
it started on the device: on a GPU that includes launching it, which short kernels notice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vil.utils.errors import one_line
from vil.utils.timing import peak_tensor_bytes, seconds

TOO_SLOW = 60.0  # times the fastest: such a candidate is left out
SLOW = 10.0  # times the fastest: it takes part in every third round
PATIENCE = 1.0  # seconds; who needs less is neither
MILLI = 1e3


@dataclass(frozen=True)
class Candidate:
    """`forward` gives the output, from which `backward` gives the gradients.

    least: seconds that both take at least, as far as is known before they run.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Sequence[Tensor]]
    least: float = 0.0


@dataclass
class Times:
    """Seconds of each round that was timed."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def forward_ms(self) -> float:
        return statistics.median(self.forward) * MILLI

    @property
    def backward_ms(self) -> float:
        return statistics.median(self.backward) * MILLI

    @property
    def total_ms(self) -> float:
        """The two medians together."""
        return self.forward_ms + self.backward_ms


def race(
    candidates: Mapping[str, Candidate],
    rounds: int,
    device: torch.device,
    yardsticks: Sequence[str] = (),
) -> tuple[dict[str, Times], dict[str, str]]:
    """The times of those that ran to the end, and why the others did not.

    yardsticks: names that stay however slow they are, and that nobody is too slow beside.
    """
    first, dropped = warm_up(candidates, device, yardsticks)
    times = {name: Times() for name in first}
    rarely = [name for name in first if first[name] > limit(first, yardsticks, SLOW)]
    for number in range(rounds):
        for name in list(times):
            if name in rarely and number % 3:
                continue
            try:
                forward, backward = turn(candidates[name], device)
            except Exception as error:
                dropped[name] = one_line(error)
                del times[name]
                continue
            times[name].forward.append(forward)
            times[name].backward.append(backward)
    return times, dropped


def warm_up(
    candidates: Mapping[str, Candidate], device: torch.device, yardsticks: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """The seconds of one call of each that stays, and why the others do not.

    Who is known to need long comes last, and does not run where that is too long.
    """
    took: dict[str, float] = {}
    dropped = {}
    more = f"over {TOO_SLOW:.0f} times the fastest"
    for name in sorted(candidates, key=lambda name: candidates[name].least):
        least, most = candidates[name].least, limit(took, yardsticks)
        if least > most:
            dropped[name] = f"too slow: its products alone need {least:.1f} s, {more}"
            continue
        try:
            took[name] = sum(turn(candidates[name], device))
            if took[name] > most:  # it may have compiled: the second call tells
                took[name] = sum(turn(candidates[name], device))
        except Exception as error:
            took.pop(name, None)
            dropped[name] = one_line(error)
    most = limit(took, yardsticks)
    for name in [name for name in took if took[name] > most and name not in yardsticks]:
        dropped[name] = f"too slow: {took.pop(name):.1f} s, {more}"
    return took, dropped


def limit(took: Mapping[str, float], yardsticks: Sequence[str], times: float = TOO_SLOW) -> float:
    """So many times the seconds of the fastest, yardsticks aside, and never below PATIENCE."""
    fastest = min((took[name] for name in took if name not in yardsticks), default=torch.inf)
    return max(PATIENCE, times * fastest)


def turn(candidate: Candidate, device: torch.device) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    outputs: list = []
    forward = seconds(lambda: outputs.append(candidate.forward()), device)
    backward = seconds(lambda: candidate.backward(outputs[0]), device)
    return forward, backward


def held(candidate: Candidate, device: torch.device) -> tuple[int, int]:
    """Bytes of tensors at the peak of one forward and backward, beyond what there was before.

    The first counts everything made, the second leaves out output and gradients, whenever within
    the call they come to be: where the peak comes before the last gradient, it is a lower bound.
    """
    results: list[Tensor] = []

    def once() -> None:
        out = candidate.forward()
        results.extend([out.detach(), *candidate.backward(out)])

    peak = peak_tensor_bytes(once, device)
    return peak, max(0, peak - sum(tensor.nbytes for tensor in results))
