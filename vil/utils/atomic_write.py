"""Replace files atomically: if a process dies, either the old file or the new one remains."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The encoding of a run's text files in every locale. Names that are not UTF-8 keep their bytes.
TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}
# The encoding of text files for other programs. Names that are not UTF-8 are escaped.
ESCAPED_TEXT = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file atomically and flush it to disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # one per process
    aside.write_text(text, **TEXT)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


@contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` at the end of the `with` block. If
    the block raises an exception, the temporary file is removed and `path` does not change."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        aside.touch()  # fail before the work if the folder cannot be written to
        yield aside
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def set_default_permissions(path: Path) -> None:
    """Set a file's permissions to the defaults of the process's umask. Needed for safetensors,
    which creates files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
