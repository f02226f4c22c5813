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
        file = self.open_file()
        chunks, missing = [], size
        while missing:
            chunk = os.pread(file.fileno(), missing, offset + size - missing)
            if not chunk:
                raise UnreadableImage(f"{self.path} ends {missing} bytes too early")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)

    def open_file(self) -> io.FileIO:
        """This process's open file, closed when its last reference is deleted."""
        pid = os.getpid()
        opened = self.opened  # read once: another thread may assign it
        if opened is None or opened[0] != pid:
            opened = self.opened = pid, io.FileIO(self.path)
        return opened[1]

    def __getstate__(self) -> dict:
        return {"path": self.path, "opened": None}
