"""Tensors for the tokens that a stage stores between its passes: in memory, or mapped from files.

Shapes: X Y grid of a stage, C channels.
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

from vil.streaming.plan import StagePlan, format_bytes
from vil.streaming.rows import StoredRows
from vil.utils.errors import ConfigError, SaveError, os_error_as


class Stores:
    """Makes the stores of the stages. folder: for files; None if no stage is stored on disk."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def make(
        self, index: int, plan: StagePlan, channels: int, dtype: torch.dtype
    ) -> list[StoredRows]:
        """Return the stores of a stage, which its passes write in turns.

        In memory a pass replaces the tokens it reads, and one store is enough, except for full
        attention. On disk the next pass writes another file, so that a pass can be repeated from
        any strip after an interruption. Raises SaveError if the disk has no room.
        """
        shape = (*plan.grid, channels)
        size = math.prod(shape) * dtype.itemsize
        count = max(1, plan.store_bytes // size)
        if plan.action == "memory":
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(count)]
        else:
            files = [self.folder / f"stage-{index}-{n}.tokens" for n in range(count)]
            tensors = [map_file(file, shape, dtype) for file in files]
        return [StoredRows(tensor, self.device) for tensor in tensors]


def map_file(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that is mapped from a file, which is created or extended.

    The room is allocated at once: a write to a mapped file on a full disk would end the process.
    Raises SaveError if that fails.
    """
    size = math.prod(shape) * dtype.itemsize
    with os_error_as(SaveError, f"{file}: no room for {format_bytes(size)} of tokens"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(descriptor).st_size < size:
                os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    mapped = np.memmap(file, np.uint8, "r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)


def check_scratch(folder: str | Path, size: int, name: str = "") -> Path:
    """Return the folder for files of `size` bytes in all, which is created if it does not exist.

    name: of the folder in it whose files are used again. Raises ConfigError if it cannot be written
    to, or if its disk has not enough room.
    """
    path = Path(folder)
    with os_error_as(ConfigError, f"scratch {folder}"):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise ConfigError(f"scratch {folder}: Permission denied")
        disk = os.statvfs(path)
        present = sum(file.stat().st_size for file in path.glob(f"{name}/*")) if name else 0
    free = disk.f_bavail * disk.f_frsize
    if free + present < size:
        raise ConfigError(
            f"scratch {folder}: {format_bytes(free)} are free, {format_bytes(size)} are needed"
        )
    return path
