"""Output files: refused before the work, not after it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vil.utils.errors import ConfigError

IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


def output_file(given: str, flag: str = "--out", endings: tuple[str, ...] = ()) -> Path:
    """Return the path to write to. Raises ConfigError where it cannot be written, or has another
    suffix."""
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
def refuse_failed_writes(path: Path, flag: str = "--out") -> Iterator[None]:
    """Raise ConfigError for what the system refuses to write inside, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error
