"""Measure one call: seconds and the peak of tensor memory, on CPU or GPU.

torch.utils.benchmark times one function at a time. Comparisons here alternate between candidates,
call by call, and need the time of each single call.
"""

import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Time of one call with its kernels. timeit switches off the garbage collector."""

    def call() -> None:
        function()
        synchronize(device)

    synchronize(device)
    return timeit.timeit(call, number=1, timer=time.perf_counter)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_tensor_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The peak of tensor memory during a call, beyond what was allocated before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        function()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
