"""Check paths in datasets and configs, which may come from untrusted sources."""

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from vil.utils.errors import DataError


def regular_file(path: str | Path) -> Path:
    """Return a path unchanged if it is a regular file or a folder. Raises OSError for other files,
    because reading a named pipe or a device might never end."""
    if not os.path.isdir(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def join_roots(root: str | Path, roots: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """Return [root, *roots] or, if `roots` is a single string or path, [root, roots]."""
    return [root, roots] if isinstance(roots, str | Path) else [root, *roots]


def unicode_hint(folder: Path, name: str) -> str:
    """Return the end of a message about a missing file: a hint if the folder has the file under a
    name that differs only in its Unicode form, as from an archive written on macOS, else ""."""
    others = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    if any(other != name and (folder / other).is_file() for other in others):
        return " (it has a file whose name differs only in its Unicode form, NFC or NFD: rename it)"
    return ""


def path_below(
    root: str | Path,
    name: str | Path,
    named_by: object,
    roots: str | Path | Iterable[str | Path] | None = None,
) -> Path:
    """Return root/name, or `name` if it is absolute. Raises DataError if the path is not allowed.

    With all links resolved, the path must be below `root` or one of the folders `roots`. roots:
    value of DATA.KWARGS.extra_roots; None if this key does not apply. named_by: the file or config
    key that contains the path, for the message.
    """
    path = Path(root, name)
    real = Path(os.path.realpath(path))
    allowed = join_roots(root, () if roots is None else roots)
    if any(real.is_relative_to(os.path.realpath(folder)) for folder in allowed):
        return path
    shown = f"{path}, a link to {real}" if path.is_symlink() else path
    remedy = f"to allow this path, add {real.parent} to DATA.KWARGS.extra_roots"
    if roots is None:
        remedy = "copy the file to this folder"
    raise DataError(f"{named_by} names {shown}, which is not below {root}: {remedy}")
