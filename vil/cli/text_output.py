"""Text that a command writes piece by piece, to a file or to standard output."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from vil.utils.errors import ConfigError


def write_pieces(pieces: Iterable[str], file: str | None) -> bool:
    """Write to the file, or to standard output without one. False if the reader of standard output
    has closed it (`| head`). Raises ConfigError for what cannot be written (a full disk)."""
    try:
        with _open(file) as stream:
            for piece in pieces:
                _write(piece, stream, file)
    except BrokenPipeError:
        _discard_stdout()
        return False
    return True


def _write(piece: str, stream: TextIO, file: str | None) -> None:
    """Write one piece through all buffers, so that a write fails only here."""
    try:
        stream.write(piece)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if file is None:
            _discard_stdout()
        name = "standard output" if file is None else f"--output-file {file}"
        raise ConfigError(f"{name}: {error.strerror or error}") from error


def _discard_stdout() -> None:
    """Python may flush stdout again as it ends (its documentation, "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _open(file: str | None) -> Iterator[TextIO]:
    """The stream to write to, which escapes file names that are not UTF-8; for standard output
    `main` has seen to it."""
    if file is None:
        yield sys.stdout
        return
    escape = "backslashreplace"
    try:
        stream = open(file, "w", encoding="utf-8", errors=escape, newline="")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error.strerror}") from error
    try:
        yield stream
    finally:
        with suppress(OSError):  # a failed write has been reported
            stream.close()
