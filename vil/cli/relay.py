"""From the package's log records to a run's log, from the first one on: also those of building."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Relay(logging.Handler):
    """Passes log records on; `holds` those that come before there is a place for them."""

    def __init__(self, holds: bool) -> None:
        super().__init__(logging.INFO)
        self.holds = holds
        self.held: list[logging.LogRecord] = []
        self.say: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.say:
            self.say(record.getMessage())
        elif self.holds:
            self.held.append(record)

    def open(self, say: Callable[[str], None]) -> None:
        """Lines of `say`'s log from here on."""
        self.say = say
        for record in self.held:
            say(record.getMessage())
        self.held.clear()


@contextmanager
def forward_logs(is_main: bool) -> Iterator[Relay]:
    """The main process's log records become lines of the run's log, once it is open.

    Without a run its warnings go to stderr after all. What other processes say while they build is
    the same and is dropped; later they write to their own stderr.
    """
    package, relay = logging.getLogger("vil"), Relay(holds=is_main)
    level = package.level
    package.addHandler(relay)
    package.propagate = False
    if is_main:
        package.setLevel(logging.INFO)
    try:
        yield relay
    finally:
        package.removeHandler(relay)
        package.setLevel(level)
        package.propagate = True
        for record in relay.held:
            if record.levelno >= logging.WARNING:
                logging.getLogger().handle(record)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
