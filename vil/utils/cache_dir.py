"""The per-user cache folder, for tuned backends, trusted plug-ins and tracebacks."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_dir() -> Path:
    """Return the path of the cache folder: $VIL_CACHE if it is set, otherwise $XDG_CACHE_HOME/vil
    or ~/.cache/vil. If the user has no home folder, the path is vil-<user id> in the system's
    folder for temporary files, such as /tmp."""
    if folder := os.environ.get("VIL_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vil").expanduser()
    except RuntimeError:  # no $HOME and no entry in passwd, as in some containers
        return _temporary_dir()


def _temporary_dir() -> Path:
    """Return the path of vil-<user id> in the system's folder for temporary files, such as /tmp.

    Creates the folder. vil runs code from its cache folder, so another user must not own it. If
    another user does, or if it cannot be created, the result is a path that cannot be written.
    """
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"vil-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid():
            return folder
    return Path(os.devnull, "vil")


@contextmanager
def hold_lock(folder: Path, name: str = "lock") -> Iterator[None]:
    """Context manager that lets only one process at a time change `folder`. It holds a lock on the
    file `name` in this folder. The operating system frees the lock if the process ends."""
    with (folder / name).open("w") as file:
        with suppress(OSError):  # of a file system without locks: processes do not wait
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
