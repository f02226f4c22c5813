"""Small files that are, whenever a process dies, the old one or the new one; a file's digest."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# How a run's text files are written in every locale. Names that are not UTF-8 keep their bytes.
TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file in one piece: readers see the old text or the new one. Names of files in
    the text keep their bytes."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes do not mix
    aside.write_text(text, **TEXT)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


@contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which becomes it at the end; nothing stays after an error."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        aside.touch()  # a place that cannot be written to is found before the work
        yield aside
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def like_others(path: Path) -> None:
    """Give a file the rights of any new one: safetensors makes its files private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
