"""Random access to a large file from any number of processes and threads."""

import io
import os
from pathlib import Path

from vil.data.image import UnreadableImage


class SharedFile:
    """A read-only file with random access, for any number of threads and processes.

    Each process opens the file at its first read. The open file is not pickled.
    """

    def __init__(self, path: str | Path):
        self.path = os.fspath(path)
        self.opened = None

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`. Raises UnreadableImage if the file ends too
        early, and OSError if it cannot be read."""
        pid, opened = os.getpid(), self.opened  # read once: another thread may assign it
        if opened is None or opened[0] != pid:
            opened = self.opened = pid, io.FileIO(self.path)  # closed with its last reference
        chunks, missing = [], size
        while missing:
            # not seek and read: threads would share the position of the file
            chunk = os.pread(opened[1].fileno(), missing, offset + size - missing)
            if not chunk:
                raise UnreadableImage(f"{self.path} ends {missing} bytes too early")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    def __getstate__(self) -> dict:
        return {"path": self.path, "opened": None}
