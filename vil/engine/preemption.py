"""What ends a run before its end: a signal, in good order, or a step that never comes to its end.

The first SIGTERM, SIGUSR1 (sent ahead by schedulers) or SIGINT (Ctrl-C) leaves a note. The ranks
agree on it, with the flags of a training step and between the batches of an evaluation; then
StoppedError is raised on all of them at the same place, and the loop saves and ends. Nothing is
saved inside a handler: it may run in the middle of a collective.

A thread looks after the process meanwhile. It ends it, with every thread's stack on stderr and in
<run>/crash/, when no step has come to its end for `hang_seconds`, or none within `grace_seconds` of
a signal. Where a step hangs without letting go of Python's lock, no thread of Python can see it:
then faulthandler's does the same a moment later, with exit code 1.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from vil.engine.distributed import DistInfo, all_reduce_max
from vil.utils.errors import HUNG, StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT_SECONDS = 2.0  # a job's signal may come twice at once: from its launcher and its group
BACKSTOP_SECONDS = 2.0
LAST_WORDS_SECONDS = 2.0  # a rank that leaves breaks its peers' collectives: they are late too
ROUND_SECONDS = 0.2
WAITS = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/")


class PreemptionGuard:
    """Record signals, and end a process that makes no progress once `watch` was called.

    Used as `with PreemptionGuard(dist) as guard:`."""

    def __init__(self, dist: DistInfo, *, hang_seconds: float = 0.0, grace_seconds: float = 30.0):
        """hang_seconds 0: a step may take for ever."""
        self.dist, self.hang_seconds, self.grace_seconds = dist, hang_seconds, grace_seconds
        self.received_signal = 0  # the signal that came here, 0: none
        self.noted_at = self.beaten_at = 0.0
        self.alone_waiting = False
        self.folder: Path | None = None
        self.status: Callable[[str, int, str], None] = lambda *_: None
        self.handlers: dict[int, object] = {}
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        self.thread = threading.Thread(target=self._look, name="guard", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.ended.set()
        self.thread.join()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def watch(self, folder: Path, status: Callable[[str, int, str], None]) -> None:
        """Steps follow. `status(state, code, reason)` is called before the process is ended."""
        self.folder, self.status = folder, status
        self.beat()

    def beat(self) -> None:
        """Something has come to its end: a step, a batch of an evaluation, a checkpoint."""
        self.beaten_at = time.monotonic()
        if self.hang_seconds and self.folder:
            patience = self.hang_seconds + BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(patience, exit=True, file=sys.__stderr__)

    def check_all_ranks(self) -> None:
        """Between two batches, on every rank: StoppedError on all if a signal came to any."""
        self.beat()
        self.raise_if_stopped(all_reduce_max(self.received_signal))

    def raise_if_stopped(self, number: int) -> None:
        """StoppedError for the signal all ranks know of; 0: none."""
        if number:
            raise StoppedError(signal.Signals(number))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a signal need not be agreed on and is heeded at once: a process without peers
        waits for data."""
        self.alone_waiting = self.dist.world == 1
        try:
            if self.alone_waiting:
                self.raise_if_stopped(self.received_signal)
            yield
        finally:
            self.alone_waiting = False

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self.received_signal:
            self.received_signal, self.noted_at = number, now
        elif now - self.noted_at > IMPATIENT_SECONDS:
            self._leave(f"a second {signal.Signals(number).name}")
        if self.alone_waiting:
            self.raise_if_stopped(self.received_signal)

    def _look(self) -> None:
        """The thread: every ROUND_SECONDS, is this process late?"""
        while not self.ended.wait(ROUND_SECONDS):
            now, stood = time.monotonic(), time.monotonic() - self.beaten_at
            if self.folder and self.hang_seconds and stood > self.hang_seconds:
                self._leave(f"no step in {self.hang_seconds:g} s", hung=True)
            since = max(self.noted_at, self.beaten_at)
            if self.received_signal and now - since > self.grace_seconds:
                name = signal.Signals(self.received_signal).name
                reason = f"{name}, and no step within {self.grace_seconds:g} s of it"
                self._leave(reason)

    def _leave(self, reason: str, *, hung: bool = False) -> None:
        """End the process here: what hangs cannot be unwound."""
        asked = StoppedError(signal.Signals(self.received_signal or signal.SIGTERM))
        state, code = ("hung", HUNG) if hung else (asked.state, asked.exit_code)
        reason = f"rank {self.dist.rank}: {reason}; {standing()}"
        faulthandler.dump_traceback_later(2 * LAST_WORDS_SECONDS, exit=True, file=sys.__stderr__)
        print(f"vil: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # whatever fails now must not keep the process alive
            self._dump()
            self.status(state, code, reason)
            if hung and not self.dist.is_main:
                time.sleep(LAST_WORDS_SECONDS)  # rank 0 says it, too, before it hears of a failure
        os._exit(code)

    def _dump(self) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        if self.folder:
            file = self.folder / "crash" / f"stacks-rank{self.dist.rank}.txt"
            file.parent.mkdir(exist_ok=True)
            with file.open("w") as stream:
                faulthandler.dump_traceback(file=stream)


def standing() -> str:
    """Where the main thread is: its innermost line outside of torch's collectives, or that it waits
    there for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    stack = traceback.extract_stack(frame)
    waits = any(place in line.filename for line in stack for place in WAITS)
    line = next((x for x in reversed(stack) if "/torch/" not in x.filename), stack[-1])
    what = "waits for other ranks" if waits else "stands"
    return f"it {what} in {line.name} ({line.filename}:{line.lineno})"
