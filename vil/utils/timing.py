"""Measure a function: seconds, and the peak of tensor memory, on the CPU as on a GPU."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Time of one call, to the end of what it started on the device.

    Python's garbage collector waits meanwhile, as in timeit: a collection takes tens of
    milliseconds, and strikes whoever makes many small objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - began
    finally:
        if collects:
            gc.enable()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_tensor_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most that one call holds in tensors beyond what there was before it.

    On the CPU counted from the profiler's allocation events, so that neither the allocator's nor
    the operating system's habits enter.
    """
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
