"""Check output files before the work, not after it."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from vil.utils.errors import ConfigError, os_error_as

IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


def output_file(given: str, flag: str = "--out", endings: tuple[str, ...] = ()) -> Path:
    """Return the path. Raises ConfigError if it cannot be written or has another suffix."""
    path = Path(given)
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {given}: expected a name that ends in {', '.join(endings)}")
    if path.is_dir():
        raise ConfigError(f"{flag} {given}: Is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {given}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {given}: Permission denied")
    return path


def refuse_failed_writes(path: Path, flag: str = "--out") -> AbstractContextManager:
    """Raise ConfigError if writing fails inside, such as on a full disk."""
    return os_error_as(ConfigError, f"{flag} {path}")


def make_folder(path: str | Path, flag: str) -> Path:
    """Make a folder and its parents, before hours of work rather than after them."""
    with os_error_as(ConfigError, f"{flag} {path}"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)
