"""Describe the machine on which results are measured, and query its cores, memory and clock."""

import functools
import importlib.util
import os
import platform
import re
import shutil
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

import torch


def machine(device: torch.device) -> dict[str, str | int]:
    """Return a description of this machine to store with results: processor or GPU, threads,
    versions, date and command."""
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
        "date": now(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def now() -> str:
    """Return the local date and time, to the second, with the offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def search_file(pattern: str, file: str) -> str | None:
    """Return group 1 of the first match of a regular expression in a file. Returns None if there is
    no match or the file cannot be read."""
    try:
        match = re.search(pattern, Path(file).read_text())
    except OSError:
        return None
    return match[1].strip() if match else None


def processor() -> str:
    """Return the processor's name, or the machine's architecture if the name is unknown."""
    name = search_file(r"model name\s*:\s*(.+)", "/proc/cpuinfo")
    return name or platform.processor() or platform.machine()


def slug(name: str) -> str:
    """Convert a name to lower-case letters and digits, separated by dashes, for file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, given its CPU affinity and the CPU
    limit of its container (cgroup v2)."""
    cores = len(affinity())
    quota = search_file(r"^(\d+ \d+)", "/sys/fs/cgroup/cpu.max")  # a limit of "max" is none
    if not quota:
        return cores
    limit, period = map(int, quota.split())
    return max(min(cores, -(-limit // period)), 1)


def affinity() -> set[int]:
    """Return the numbers of the CPU cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes. For a CPU, the memory limit of the container
    (cgroup v2) is taken into account."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = search_file(r"MemAvailable:\s*(\d+) kB", "/proc/meminfo")
    if not free:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = (
        search_file(r"^(\d+)", f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")
    )  # a limit of "max" is none
    return min(int(free) * 1024, int(limit) - int(used) if limit and used else sys.maxsize)


def total_bytes() -> int:
    """Return the memory of this machine in bytes, or its container's limit (cgroup v2) if lower."""
    limit = search_file(r"^(\d+)", "/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, int(limit) if limit else total)


def gigabytes(size: int) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    return f"{size / 1e9:.3g} GB"


def version(package: str) -> str:
    """Return the version of an installed package, or "none" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def has_compiler(device: str) -> bool:
    """Return whether torch.compile can run: it needs Triton on CUDA, and a C++ compiler on other
    devices. device: the device type."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None
