"""The machine that figures are taken on, and how much memory it has to spare."""

import datetime
import functools
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import torch


def machine(device: torch.device) -> dict[str, str | int]:
    """What a reader must know of a result: processor or GPU, threads, versions, date, command."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "name": card or processor(),
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def processor() -> str:
    """The name that the processor gives itself, or else its architecture."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def slug(name: str) -> str:
    """A name as part of a file's: lower case, letters and digits joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors could take now; in a container what its limit leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if not found:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group, free = Path("/sys/fs/cgroup"), int(found[1]) * 1024
    try:
        limit, taken = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(taken))
    except (OSError, ValueError):  # no cgroup of the second version, or "max"
        return free


@functools.cache
def has_compiler(device: str) -> bool:
    """Whether torch.compile has what it needs: Triton on CUDA, else a C++ compiler, looked for
    under the names that torch looks for."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None
