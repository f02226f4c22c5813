"""Random access to a large file from any number of processes and threads."""

import io
import os
from pathlib import Path

from vil.data.image import UnreadableImage


class SharedFile:
    """Bytes of a file by offset. Each process opens the file at its first read.

    pread does not use the file position, which forked workers would share: readers of one open
    archive could get each other's bytes. The open file is not pickled, for spawned workers.
    """

    def __init__(self, path: str | Path):
        self.path = os.fspath(path)
        self.opened = None

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises OSError, UnreadableImage."""
        pid, opened = os.getpid(), self.opened  # read once: another thread may assign it
        if opened is None or opened[0] != pid:
            opened = self.opened = pid, io.FileIO(self.path)  # closed with its last reference
        chunks, missing = [], size
        while missing:
            chunk = os.pread(opened[1].fileno(), missing, offset + size - missing)
            if not chunk:
                raise UnreadableImage(f"{self.path} ends {missing} bytes too early")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    def __getstate__(self) -> dict:
        return {"path": self.path, "opened": None}
