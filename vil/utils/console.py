"""Write to stdout and stderr, which may be terminals, closed pipes, or files on a full disk."""

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# C0, DEL and C1 control characters. Printed as part of a file name they could change the screen.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
IN_LINES = {code: text for code, text in CONTROL.items() if chr(code) not in "\n\t"}

WIDTH, NARROWEST = 100, 40  # columns of wrapped text on a terminal: the most, the fewest


class OutputError(OSError):
    """Error for standard output that cannot be written, for example on a full disk."""

    exit_code = 2


class ClosedOutputError(OutputError):
    """Error for standard output whose reader has closed the pipe (`| head`)."""

    exit_code = 0


def printable(text: object) -> str:
    """Return text as one line, with control characters (also newlines) replaced by escape
    sequences."""
    return str(text).translate(CONTROL)


def fit_to_terminal(text: str, indent: int = 2, file: TextIO | None = None) -> str:
    """Wrap the lines of a text to the width of the terminal, and to WIDTH columns if it is wider.

    Words, such as paths, are not broken, so that they can be copied. If `file` is not a terminal,
    the text is returned unchanged, so that programs find each message in one line.

    indent: columns by which the second and later lines of a line are indented. file: where the text
    will be printed; None for standard output.
    """
    if not (file or sys.stdout).isatty():
        return text
    width = max(min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH), NARROWEST)
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


class TerminalFormatter(logging.Formatter):
    """Formatter of log records for stderr, which wraps them if stderr is a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return fit_to_terminal(super().format(record), file=sys.stderr)


def echo(text: str, file: TextIO | None = None) -> None:
    """Print and flush a line, and ignore errors. file: an open file; None for standard output."""
    with suppress(OSError, ValueError):
        print(text, file=file, flush=True)


def echo_error(text: str) -> None:
    """Print and flush a line to stderr, and ignore errors."""
    echo(text, sys.stderr)


class StandardStream:
    """A wrapper of standard output or stderr that escapes control characters on a terminal, and
    always on stderr, whose messages are often shown later.

    strict: whether a failed write raises OutputError; otherwise it is ignored, as for stderr.
    """

    def __init__(self, stream: TextIO, *, strict: bool) -> None:
        self.stream, self.strict, self.escapes = stream, strict, stream.isatty() or not strict

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._checked():
            self.stream.write(text.translate(IN_LINES) if self.escapes else text)
        return len(text)

    def flush(self) -> None:
        with self._checked():
            self.stream.flush()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.strict:
                return
            kind = ClosedOutputError if isinstance(error, BrokenPipeError) else OutputError
            raise kind(f"standard output: {error.strerror or error}") from error


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by `StandardStream`s in a `with` block.

    A standard stream that the parent process closed is replaced by /dev/null. If it stayed closed,
    the next file to be opened would get its file descriptor and receive the printed text.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(number)
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, out, err = (
        open(os.devnull, mode) if stream is None else stream  # noqa: SIM115
        for stream, mode in zip(before, "rww")
    )
    if hasattr(out, "reconfigure"):  # escape characters that the locale cannot encode
        out.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = StandardStream(out, strict=True), StandardStream(err, strict=False)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def discard_unwritten() -> None:
    """Discard buffered output that cannot be written, so that Python does not fail to flush it at
    exit. See "Note on SIGPIPE" in the documentation of Python's signal module."""
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
