"""A large file read in place by any number of processes and threads."""

import io
import os
from pathlib import Path

from vil.data.image import UnreadableImage


class SharedFile:
    """Bytes of a file by place. Each process opens it for itself, when it first reads.

    pread moves no file position: a position that forked workers share is how readers of one open
    archive get each other's bytes. The open file is not pickled, so spawned workers agree.
    """

    def __init__(self, path: str | Path):
        self.path = os.fspath(path)
        self.opened = None

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. OSError; UnreadableImage when the file is cut."""
        file = self.own_file()
        parts, missing = [], size
        while missing:
            part = os.pread(file.fileno(), missing, offset + size - missing)
            if not part:
                raise UnreadableImage(f"{self.path} ends {missing} bytes too early")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def own_file(self) -> io.FileIO:
        """This process's open file; it is closed when the last reader lets go of it."""
        pid = os.getpid()
        opened = self.opened  # one look: another thread may be at the next line
        if opened is None or opened[0] != pid:
            opened = self.opened = pid, io.FileIO(self.path)
        return opened[1]

    def __getstate__(self) -> dict:
        return {"path": self.path, "opened": None}
