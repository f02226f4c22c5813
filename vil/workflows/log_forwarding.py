"""Buffer the package's log records until the run's log opens, then forward them to this log.

A run or a command logs each warning only once, even if several stages or loaders repeat it, or if
the same config is processed again.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DistinctWarnings:
    """Logging filter that drops a warning of this package if an earlier record had the same
    message."""

    def __init__(self) -> None:
        self.first: dict[str, logging.LogRecord] = {}  # message -> its first record

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not record.name.startswith("vil"):
            return True
        return self.first.setdefault(record.getMessage(), record) is record


_active: list[DistinctWarnings] = []  # the filter of the current `log_warnings_once` block


@contextmanager
def log_warnings_once() -> Iterator[DistinctWarnings]:
    """Log each warning of the package `vil` only once in a `with` block. Blocks may be nested."""
    if _active:
        yield _active[0]
        return
    _active.append(DistinctWarnings())
    handlers = [*logging.getLogger().handlers] or [logging.lastResort]
    for handler in handlers:
        handler.addFilter(_active[0])
    try:
        yield _active[0]
    finally:
        for handler in handlers:
            handler.removeFilter(_active[0])
        _active.clear()


class LogForwarder(logging.Handler):
    """Logging handler that passes messages to the function given to `open`.

    buffer: whether records that arrive before `open` is called are buffered; otherwise, they are
    dropped. distinct: filter that drops repeated warnings.
    """

    def __init__(self, buffer: bool, distinct: DistinctWarnings) -> None:
        super().__init__(logging.INFO)
        self.buffer, self.distinct = buffer, distinct
        self.records: list[logging.LogRecord] = []
        self.say: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if not (self.say or self.buffer) or not self.distinct.filter(record):
            return
        if self.say:
            self.say(record.getMessage())
        else:
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

    The caller opens the forwarder once the run's log is open. Until then, the main process buffers
    records, and other processes drop them. If the forwarder is never opened, buffered warnings go
    to the root logger at the end of the block. Repeated warnings are dropped.
    """
    package = logging.getLogger("vil")
    level = package.level
    with log_warnings_once() as distinct:
        forwarder = LogForwarder(is_main, distinct)
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
