"""Measure the resident memory of this process, which includes the allocations of libraries."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from vil.utils.machine import search_file

T = TypeVar("T")
RESET = Path("/proc/self/clear_refs")
PEAK = "5"  # written to RESET, it resets the peak VmHWM, see proc(5)


def resident_growth(load: Callable[[], T], use: Callable[[T], object]) -> tuple[T, int | None]:
    """Load an object, use it twice, and measure how much the resident memory of the process grows.

    Returns (result of `load`, growth in bytes). The growth is the peak during the second call of
    `use`, minus the memory before `load`. It includes memory that the first call allocates and
    keeps, for example for caches. It is None on systems other than Linux.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # freed memory that is kept would hide growth
        ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes("VmRSS")
    loaded = load()
    use(loaded)
    try:
        RESET.write_text(PEAK)
    except OSError:
        before = None
    use(loaded)
    peak = resident_bytes("VmHWM")
    return loaded, None if before is None or peak is None else max(0, peak - before)


def resident_bytes(field: str) -> int | None:
    """Return the resident memory of this process in bytes, or None if the system has no
    /proc/self/status. field: VmRSS (now), VmHWM (peak) or RssAnon (now, without mapped files)."""
    found = search_file(rf"{field}:\s+(\d+) kB", "/proc/self/status")
    return int(found) * 1024 if found else None
