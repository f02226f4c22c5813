"""Measure the time and the peak tensor memory of one call, on CPU or GPU.

torch.utils.benchmark repeats one function. The comparisons in this package alternate between
functions, so they need the time of every single call.
"""

import os
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, including the device kernels that it launches. Garbage
    collection is disabled during the call."""

    def call() -> None:
        function()
        synchronize(device)

    synchronize(device)
    return timeit.timeit(call, number=1, timer=time.perf_counter)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_tensor_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of tensor memory during a call, minus the memory that was allocated before
    the call, in bytes."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    options = dict(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with no_profiler_log(), profile(**options) as record:
        function()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def no_profiler_log() -> Iterator[None]:
    """Context manager that keeps torch's profiler from reporting on stderr that there is no GPU.

    A torch build with CUDA reports this when a process first uses the profiler. If the user has set
    a log level in KINETO_LOG_LEVEL, the context manager does nothing.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)
