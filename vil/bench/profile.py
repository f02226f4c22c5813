"""What a step spends its time on, by module and operator, and a trace to look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from vil.bench.module_scopes import Places
from vil.utils.timing import synchronize

MODULE = "module: "
BACKWARD = "autograd::engine::evaluate_function: "
MICRO = 1e-6


class Cost(NamedTuple):
    """All calls of an operator in a module, without the operators they call."""

    module: str
    way: str
    operator: str
    calls: int
    seconds: float
    share: float  # of all operators


class Labelled(Places):
    """Places that show in a trace as well."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.labels: list[record_function] = []

    def _enter(self, place: str) -> None:
        super()._enter(place)
        self.labels.append(record_function(MODULE + place))
        self.labels[-1].__enter__()

    def _leave(self) -> None:
        self.labels.pop().__exit__(None, None, None)
        super()._leave()


def profiled(
    step: Callable[[], object], model: nn.Module, device: torch.device, trace: Path
) -> list[Cost]:
    """The costs of one step, the greatest first; one step before it warms up.

    trace: a file for chrome://tracing or Perfetto, packed if its name ends in .gz. On CUDA the time
    is the device's.
    """
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    step()
    with Labelled(model) as places, profile(activities=kinds, acc_events=True) as record:
        step()
        synchronize(device)
    record.export_chrome_trace(str(trace))
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in record.events():
        if event.name.startswith((MODULE, BACKWARD)):
            continue
        own = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        row = found[(*place_of(event, places), event.name)]
        row[0] += 1
        row[1] += own * MICRO
    total = sum(seconds for _, seconds in found.values())
    costs = [
        Cost(*key, int(calls), seconds, seconds / total) for key, (calls, seconds) in found.items()
    ]
    return sorted(costs, key=lambda cost: -cost.seconds)


def place_of(event: FunctionEvent, places: Places) -> tuple[str, str]:
    """The module an event belongs to, and its direction."""
    above = event.cpu_parent
    while above is not None:
        if above.name.startswith(MODULE):
            return above.name.removeprefix(MODULE), "forward"
        if above.name.startswith(BACKWARD):
            return places.of_number(above.sequence_nr), "backward"
        above = above.cpu_parent
    return places.stack[0], "forward"
