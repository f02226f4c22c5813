"""Let the C library keep freed memory for the next tensors, instead of returning it to the system.

PyTorch frees and allocates large CPU tensors all the time. By default glibc returns their memory to
the system, which then fills each new page with zeros.
"""

import ctypes
import os
import sys
from contextlib import suppress

# {parameter of mallopt(3): bytes}; the first is the largest value that glibc allows
LARGEST_ON_HEAP, KEPT, GROWTH = 32 * 2**20, 512 * 2**20, 64 * 2**20
SETTINGS = {-3: LARGEST_ON_HEAP, -1: KEPT, -2: GROWTH}  # mmap threshold, trim threshold, top pad
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let glibc keep up to 512 MiB of freed memory in this process. Returns whether the setting was
    made.

    Does nothing on systems without glibc. Also does nothing if an environment variable configures
    glibc's memory or preloads a library, which may be another allocator.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in VARIABLES):
        return False
    with suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        results = [set_option(name, size) for name, size in SETTINGS.items()]
        return all(results)
    return False
