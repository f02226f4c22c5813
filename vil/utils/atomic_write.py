"""Replace files atomically: a process that dies leaves the old file or the new one."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The encoding of a run's text files in every locale. Names that are not UTF-8 keep their bytes.
TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file atomically and durably."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # one per process
    aside.write_text(text, **TEXT)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


@contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` that replaces it at the end; an error removes it."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        aside.touch()  # fail before the work if the folder cannot be written to
        yield aside
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def set_default_permissions(path: Path) -> None:
    """Give a file the permissions of a new one. safetensors makes its files private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
