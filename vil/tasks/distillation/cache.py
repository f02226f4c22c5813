"""A file with a network's outputs for the images of a dataset, filled as they are computed.

Shapes: N images of the dataset, R numbers per image, B images of a batch.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vil.streaming.map_files import create_map
from vil.utils.errors import SaveError, os_error_as

LARGEST = np.finfo(np.float16).max


class OutputCache:
    """Rows of R numbers for N images, in float16, in the file `<name>.npy` in a folder.

    The file `<name>.sums.npy` has the CRC-32 of each row, and 0 for a row that is not stored. A row
    that does not match its sum counts as not stored. So any number of processes may write to the
    files, and may be killed at any time.
    """

    def __init__(self, folder: Path, name: str, num_images: int, width: int):
        """Open the files, or create them. Raises SaveError if this fails, such as on a full disk,
        because the disk space is allocated immediately."""
        with os_error_as(SaveError, f"{folder} cannot be created"):
            folder.mkdir(parents=True, exist_ok=True)
        shape = (num_images, width)
        self.rows = create_map(folder / f"{name}.npy", shape, np.dtype(np.float16))
        sums = folder / f"{name}.sums.npy"
        self.sums = create_map(sums, (num_images,), np.dtype(np.uint32))

    def read(self, indices: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Return (rows, missing): a copy of the rows (B, R) of images, and the positions in
        `indices` of the images whose rows are not stored."""
        rows = self.rows[indices]
        missing = [
            i for i, (row, index) in enumerate(zip(rows, indices)) if _sum(row) != self.sums[index]
        ]
        return rows, missing

    def write(self, indices: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """Store the rows (B, R) of images, and return them as stored, in float16."""
        rows = rows.clip(-LARGEST, LARGEST).astype(np.float16)
        for index, row in zip(indices, rows):
            self.rows[index], self.sums[index] = row, _sum(row)
        return rows


def _sum(row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes()) or 1  # 0 marks rows that are not stored
