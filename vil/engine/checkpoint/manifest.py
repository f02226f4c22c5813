"""Write folders atomically: after a crash or power failure, a folder is complete or absent.

A manifest has the size and SHA-256 of each file, and a second file has the SHA-256 of the manifest.
Together they detect files that have changed on the disk.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vil.utils.atomic_write import replace_text, sha256_of, sync

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
FORMAT = 2


@contextmanager
def new_folder(
    final: Path, size: int, *, spare: Path | None = None, **metadata: object
) -> Iterator[Path]:
    """Yield a temporary folder to write files to, and rename it to `final` on exit.

    Before the folder is renamed, a manifest is added, which includes the entries of `metadata`.
    After an error, the temporary folder is removed instead.

    size: total size of the files in bytes. Raises OSError if the disk has less free space.
    spare: path to which an older folder at `final` is renamed. If `spare` is None or exists, the
    older folder is removed.
    """
    for leftover in final.parent.glob(".*.tmp"):  # of killed processes
        remove(leftover)
    aside = final.with_name(f".{final.name}.tmp")
    aside.mkdir(parents=True)
    try:
        if (free := shutil.disk_usage(final.parent).free) < size:
            text = f"{size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
            raise OSError(errno.ENOSPC, text, str(final.parent))
        yield aside
        files = sorted(aside.iterdir())
        manifest = {"format": FORMAT, **metadata, "files": {f.name: fingerprint(f) for f in files}}
        for file in files:
            sync(file)
        replace_text(aside / MANIFEST, json.dumps(manifest, indent=1))
        replace_text(aside / MANIFEST_HASH, hash_manifest(aside))
        if spare and final.is_dir() and not spare.exists():
            os.rename(final, spare)
        elif os.path.lexists(final):  # a corrupt checkpoint: the run resumed from an older one
            remove(final)
        os.rename(aside, final)
        sync(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder with its files, a file, or a link (not what the link points to)."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def hash_manifest(folder: Path) -> str:
    return sha256_of(folder / MANIFEST) + "\n"


def fingerprint(file: Path) -> dict[str, int | str]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def find_corruption(folder: Path) -> str | None:
    """Compare the files in a folder with its manifest. Returns the reason why the folder is
    corrupt, or None if all files are unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"].items()
        intact = (folder / MANIFEST_HASH).read_text() == hash_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({type(error).__name__})"
    if version != FORMAT:
        return f"{MANIFEST} has format {version}, this version of vil reads format {FORMAT}"
    if not intact:
        return f"{MANIFEST} was changed (SHA-256 differs)"
    for name, expected in files:
        if Path(name).name != name:
            return f"{MANIFEST} names {name}, which is outside the folder"
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            actual = fingerprint(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if actual != expected:
            return f"{name} was changed (size or SHA-256 differs)"
    return None
