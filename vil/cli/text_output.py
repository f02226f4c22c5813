"""Write text piece by piece, to a file or to standard output."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress

from vil.utils.errors import ConfigError


def write_pieces(pieces: Iterable[str], file: str | None) -> None:
    """Write to the file, or to standard output without one; names that are not UTF-8 are escaped.

    Raises BrokenPipeError if the reader of standard output has closed it (`| head`), ConfigError
    for other failed writes, such as on a full disk.
    """
    name = f"--output-file {file}" if file else "standard output"
    escape = dict(encoding="utf-8", errors="backslashreplace", newline="")
    try:
        stream = open(file, "w", **escape) if file else sys.stdout  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    try:
        for piece in pieces:
            try:
                stream.write(piece)
                stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                if not file:
                    discard_stdout()
                raise ConfigError(f"{name}: {error.strerror or error}") from error
    finally:
        if file:
            with suppress(OSError):  # a failed write has been reported
                stream.close()


def discard_stdout() -> None:
    """Send what Python still flushes at its end to nowhere (its docs, "Note on SIGPIPE")."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
