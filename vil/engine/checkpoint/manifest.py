"""Files that are either whole or not there, whenever the process dies or the power fails.

Everything is written aside, synced, renamed into place, and the folder that holds it synced. What
is in place can still rot (a flipped bit loads silently), so a checkpoint's manifest holds the size
and SHA-256 of each file, and a file beside it the SHA-256 of the manifest.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

from vil.utils.atomic_write import replace_text, sha256_of, sync

MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
FORMAT = 2  # 1 had no seal


def begin_folder(final: Path) -> Path:
    """An empty folder beside `final` to fill; what killed processes left there is removed."""
    for leftover in final.parent.glob(".*.tmp"):
        remove(leftover)
    aside = final.with_name(f".{final.name}.tmp")
    aside.mkdir(parents=True)
    return aside


def need_space(folder: Path, size: int) -> None:
    """OSError now rather than in the middle of a file, if the disk has no `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < size:
        text = f"{size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
        raise OSError(errno.ENOSPC, text, str(folder))


def publish_folder(aside: Path, final: Path, **facts: object) -> None:
    """Sync the files in `aside`, describe them and `facts` in a manifest, rename to `final`."""
    files = sorted(aside.iterdir())
    manifest = {"format": FORMAT, **facts, "files": {f.name: fingerprint(f) for f in files}}
    for file in files:
        sync(file)
    replace_text(aside / MANIFEST, json.dumps(manifest, indent=1))
    replace_text(aside / SEAL, seal(aside))
    if os.path.lexists(final):  # it was found damaged when the run resumed from an older one
        remove(final)
    os.rename(aside, final)
    sync(final.parent)


def remove(path: Path) -> None:
    """Remove a folder or a file; of a link the link, and not what somebody keeps elsewhere."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def seal(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() + "\n"


def fingerprint(file: Path) -> dict[str, int | str]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def find_corruption(folder: Path) -> str | None:
    """Why a published folder cannot be used, None if it is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"].items()
        whole = version == 1 or (folder / SEAL).read_text() == seal(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({type(error).__name__})"
    if version not in (1, FORMAT):
        return f"it has format {version}, this version reads up to {FORMAT}"
    if not whole:
        return f"{MANIFEST} is not as it was written (SHA-256 differs)"
    for name, expected in files:
        if Path(name).name != name:
            return f"{MANIFEST} names {name}, which lies elsewhere"
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            found = fingerprint(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != expected:
            return f"{name} is not as it was written (size or SHA-256 differs)"
    return None
