"""Buffer the package's log records until the run's log opens, then forward them to that log."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LogForwarder(logging.Handler):
    """Logging handler that passes messages to the function given to `open`. buffer: whether to keep
    the records that arrive before `open` is called, or to drop them."""

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
        """Pass the messages of the buffered records, and of all later records, to `say`."""
        self.say = say
        for record in self.records:
            say(record.getMessage())
        self.records.clear()


@contextmanager
def forward_logs(is_main: bool) -> Iterator[LogForwarder]:
    """Redirect the log records of the package `vil` to a LogForwarder in a `with` block.

    The caller calls the forwarder's `open` once the run's log is open. Records that arrive earlier
    are buffered in the main process and dropped in the other processes. If `open` is never called,
    the buffered warnings go to the root logger at the end of the block. is_main: whether this is
    the main process.
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


@contextmanager
def distinct_warnings() -> Iterator[None]:
    """Log the warnings of a `with` block at its end, and repeated ones only once. Loading several
    similar configs, for example, repeats warnings."""
    with forward_logs(True) as logs:
        try:
            yield
        finally:
            logs.records[:] = {record.getMessage(): record for record in logs.records}.values()
