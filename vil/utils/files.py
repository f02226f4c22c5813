"""Small files that are, whenever a process dies, the old one or the new one."""

import os
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
