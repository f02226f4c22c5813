"""Where a command writes what it shows: refused before the work, not after it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vil.config import ConfigError

PICTURES = (".png", ".svg", ".pdf", ".jpg")


def output_file(given: str, flag: str = "--out", endings: tuple[str, ...] = ()) -> Path:
    """The path to write to. ConfigError where it cannot be written, or ends otherwise."""
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


@contextmanager
def written(path: Path, flag: str = "--out") -> Iterator[None]:
    """ConfigError for what the system refuses inside (a full disk)."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error
