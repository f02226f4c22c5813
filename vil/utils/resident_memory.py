"""Measure the resident memory of this process, which includes the allocations of libraries."""

import ctypes
import gc
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
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
    before = _read("VmRSS")
    loaded = load()
    use(loaded)
    try:
        RESET.write_text(PEAK)
    except OSError:
        before = None
    use(loaded)
    peak = _read("VmHWM")
    return loaded, None if before is None or peak is None else max(0, peak - before)


def _read(field: str) -> int | None:
    """Return the value in bytes of a field of /proc/self/status, such as "VmRSS", or None if the
    system has no such file."""
    with suppress(OSError):
        found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"))
        return int(found[1]) * 1024 if found else None
    return None
