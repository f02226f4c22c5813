"""End a command after SIGINT (Ctrl-C), SIGTERM or SIGHUP, without a traceback.

The signals raise KeyboardInterrupt, so that temporary files are removed and workers are stopped.
While a module is being imported, they end the process at once: an exception in the middle of the
import of a compiled package, such as torch, may abort the process instead.

`vil train` and `vil sweep` replace these handlers while they train, see
`vil.engine.preemption`. This file must be fast to import.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """Exception that ends a command after SIGTERM or SIGHUP."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number  # as a shell reports a process that the signal killed


def stop(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise KeyboardInterrupt or, during an import, end the process. A second
    SIGTERM or SIGHUP always ends the process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)


@contextmanager
def stop_signals() -> Iterator[None]:
    """Handle SIGNALS by `stop` in a `with` block, except for a signal that the process ignores, as
    SIGHUP after nohup. Threads other than the main one cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
