"""Buffer log records until the run's log opens, then forward them."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LogForwarder(logging.Handler):
    """Forwards records to a function; with `buffer`, keeps those that come before `open`."""

    def __init__(self, buffer: bool) -> None:
        super().__init__(logging.INFO)
        self.buffer = buffer
        self.records: list[logging.LogRecord] = []
        self.say: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.say:
            self.say(record.getMessage())
        elif self.buffer:
            self.records.append(record)

    def open(self, say: Callable[[str], None]) -> None:
        """Forward to `say` from here on, the buffered records first."""
        self.say = say
        for record in self.records:
            say(record.getMessage())
        self.records.clear()


@contextmanager
def forward_logs(is_main: bool) -> Iterator[LogForwarder]:
    """Make the package's log records lines of the run's log, once it is open.

    If it never opens, the main process's warnings go to stderr. Other processes log the same while
    they build, which is dropped; later they write to their own stderr.
    """
    package, forwarder = logging.getLogger("vil"), LogForwarder(buffer=is_main)
    level = package.level
    package.addHandler(forwarder)
    package.propagate = False
    if is_main:
        package.setLevel(logging.INFO)
    try:
        yield forwarder
    finally:
        package.removeHandler(forwarder)
        package.setLevel(level)
        package.propagate = True
        for record in forwarder.records:
            if record.levelno >= logging.WARNING:
                logging.getLogger().handle(record)


def to_stderr(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
