"""Create tensors for the tokens that a stage stores between passes, in memory or mapped from files.

Shapes: X Y grid of a stage, C channels.
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

from vil.streaming.map_files import allocate
from vil.streaming.plan import StagePlan, format_bytes
from vil.streaming.rows import StoredRows
from vil.utils.errors import ConfigError, SaveError, os_error_as


class Stores:
    """A factory of the tensors in which stages store their tokens between passes. folder: folder of
    tensors that are mapped from files; None if all tensors are in memory."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def make(
        self, index: int, plan: StagePlan, channels: int, dtype: torch.dtype
    ) -> list[StoredRows]:
        """Create the tensors in which a stage stores its tokens: one that each pass of the stage
        overwrites, or two that the passes write in turn. Raises SaveError if the disk is full."""
        shape = (*plan.grid, channels)
        size = math.prod(shape) * dtype.itemsize
        # One in memory, because a pass overwrites the tokens that it reads, but two for full
        # attention. Up to two on disk, so that an interrupted pass can resume from any strip.
        count = max(1, plan.store_bytes // size)
        if plan.action == "memory":
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(count)]
        else:
            files = [self.folder / f"stage-{index}-{n}.tokens" for n in range(count)]
            tensors = [map_file(file, shape, dtype) for file in files]
        return [StoredRows(tensor, self.device) for tensor in tensors]


def map_file(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that is mapped from a file. Creates or extends the file.

    The disk space is allocated immediately. Raises SaveError if the allocation fails or the file
    cannot be opened.
    """
    size = math.prod(shape) * dtype.itemsize
    allocate(file, size)
    with os_error_as(SaveError, f"{file}"):
        mapped = np.memmap(file, np.uint8, "r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)


def check_scratch(folder: str | Path, size: int, name: str = "") -> Path:
    """Check the scratch folder, after creating it if necessary, and return its path.

    size: total bytes of the files. name: subfolder for the files. Files that an earlier run left in
    it are reused, so they need no new space. Raises ConfigError if the folder is not writable, or
    the disk has too little space.
    """
    path = Path(folder)
    with os_error_as(ConfigError, f"scratch {folder}"):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise ConfigError(f"scratch {folder}: no permission to write to this folder")
        disk = os.statvfs(path)
        present = sum(file.stat().st_size for file in path.glob(f"{name}/*")) if name else 0
    free = disk.f_bavail * disk.f_frsize
    if free + present < size:
        raise ConfigError(
            f"scratch {folder}: the disk has {format_bytes(free)} of free space, but "
            f"the files need {format_bytes(size)}: free some space, or choose another folder"
        )
    return path
