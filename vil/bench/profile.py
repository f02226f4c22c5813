"""Measure the time of each module and operator in a training step, and write a profiler trace."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from vil.bench.module_scopes import OUTSIDE, ModuleScopes
from vil.utils.errors import ConfigError
from vil.utils.timing import synchronize

MODULE = "module: "
BACKWARD = "autograd::engine::evaluate_function: "
MICRO = 1e-6


class Cost(NamedTuple):
    """Total time of one operator in one module, excluding the time of operators that it calls.

    way: the pass in which the operator ran, "forward" or "backward". calls: number of calls.
    seconds: total time. share: fraction of the time of all operators.
    """

    module: str
    way: str
    operator: str
    calls: int
    seconds: float
    share: float  # of all operators


class LabeledScopes(ModuleScopes):
    """A `ModuleScopes` that also labels each module's forward pass in the profiler's trace."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.labels: list[record_function] = []

    def enter(self, name: str) -> None:
        super().enter(name)
        self.labels.append(record_function(MODULE + name))
        self.labels[-1].__enter__()

    def leave(self) -> None:
        self.labels.pop().__exit__(None, None, None)
        super().leave()


def profiled(
    step: Callable[[], object], model: nn.Module, device: torch.device, trace: Path
) -> list[Cost]:
    """Profile one training step after a warm-up step. Returns the costs, longest time first.

    trace: file to write for chrome://tracing or Perfetto, compressed if its name ends in .gz. The
    times are device times on CUDA, otherwise CPU times. Raises ConfigError if the profiler records
    no times.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    step()
    with LabeledScopes(model) as scopes, profile(activities=activities, acc_events=True) as record:
        step()
        synchronize(device)
    record.export_chrome_trace(str(trace))
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in record.events():
        if not event.name.startswith((MODULE, BACKWARD)):
            micros = event.self_device_time_total if cuda else event.self_cpu_time_total
            times[(*find_module(event, scopes), event.name)].append(micros * MICRO)
    total = sum(map(sum, times.values()))
    if not total:
        raise ConfigError(
            f"the profiler recorded no times on {device.type}: allow this process to read the "
            "device's performance counters, or profile with DEVICE cpu"
        )
    costs = [Cost(*key, len(t), sum(t), sum(t) / total) for key, t in times.items()]
    return sorted(costs, key=lambda cost: -cost.seconds)


def find_module(event: FunctionEvent, scopes: ModuleScopes) -> tuple[str, str]:
    """Find the module and the pass of a profiler event. Returns (module name, "forward" or
    "backward")."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(MODULE):
            return parent.name.removeprefix(MODULE), "forward"
        if parent.name.startswith(BACKWARD):
            return scopes.of_backward(parent.sequence_nr)
        parent = parent.cpu_parent
    return OUTSIDE, "forward"
