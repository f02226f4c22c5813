"""Set up the device, process group, precision and global torch settings of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from yacs.config import CfgNode

from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.utils.errors import ConfigError, as_config_error

AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Number of compiled convolutions that oneDNN caches, each for one shape. The default of 1,024 is
# too small for images of many sizes: a detector compiled most convolutions again while training.
ONEDNN_KERNELS = 8192


@as_config_error
def configure_device(cfg: CfgNode) -> torch.device:
    """Apply the config's global torch settings, such as TF32, and return the device of the run.

    Raises ConfigError if the device is not available or does not support the config's AMP.DTYPE.
    """
    torch.backends.cudnn.allow_tf32 = cfg.AMP.TF32
    torch.set_float32_matmul_precision("high" if cfg.AMP.TF32 else "highest")
    torch.autograd.set_detect_anomaly(cfg.SOLVER.DETECT_ANOMALY)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_KERNELS))
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = _find_device(cfg.DEVICE)
    if device.type != "cpu":
        _start_device(device)
    bf16_on_cuda = device.type == "cuda" and cfg.AMP.ENABLED and cfg.AMP.DTYPE == "bfloat16"
    if bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{name} does not support AMP.DTYPE bfloat16: use float16")
    return device


def _find_device(name: str) -> torch.device:
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    device = torch.device(name)
    if not available[device.type]:
        there = ", ".join(kind for kind, found in available.items() if found)
        raise ConfigError(f"DEVICE {name} was not found (available: {there})")
    if (device.index or 0) >= max(torch.cuda.device_count(), 1):
        raise ConfigError(f"DEVICE {name} was not found ({torch.cuda.device_count()} CUDA devices)")
    return device


def _start_device(device: torch.device) -> None:
    """Raise ConfigError if a GPU is there but cannot be used, for example because of its driver."""
    try:
        torch.zeros((), device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"DEVICE {device} cannot be used: {reason}; or set DEVICE cpu") from error


@contextmanager
def process_group(backend: str, device: torch.device) -> Iterator[DistInfo]:
    """Initialize the process group for a `with` block if there are several processes.

    Yields the rank and the number of processes. If the calling script has already initialized a
    group, that group and the script's GPU are used, and the group is not destroyed at the end.
    backend: see `distributed.start`.
    """
    if torch.distributed.is_initialized():
        yield distributed.current()
        return
    dist = as_config_error(distributed.start)(backend, device)
    try:
        yield dist
    finally:
        distributed.stop()


def amp_dtype(name: str, *, enabled: bool) -> torch.dtype | None:
    """Return the autocast dtype, or None if autocast is disabled. name: value of AMP.DTYPE."""
    return AMP_DTYPES[name] if enabled else None
