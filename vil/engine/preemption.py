"""Stop a run cleanly after a signal, and end it by force if a step hangs.

If any rank receives one of SIGNALS, all ranks raise StoppedError at the same point, and the loop
saves a checkpoint. For this, the ranks exchange received signals in each training step, and between
the batches of an evaluation.

A watchdog thread ends the process if no step finishes within `hang_seconds`. After a signal, the
limit is `grace_seconds`, which is not applied while a checkpoint is saved. Before the thread ends
the process, it writes the stacks of all threads to stderr and to <run>/crash/.

If a hanging step holds Python's GIL, the watchdog thread cannot run. A timer of faulthandler then
writes the stacks to stderr only, about 2 x `hang_seconds` after the last progress, and ends the
process with exit code 1.
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
from typing import Any

from vil.engine.distributed import DistInfo, all_reduce_max
from vil.utils.console import echo_error
from vil.utils.errors import HUNG, StoppedError

# SIGUSR1: sent by schedulers before they end a job. SIGINT: Ctrl-C. SIGHUP: a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
REPEAT_SECONDS = 2.0  # the launcher and the process group may both deliver the same signal
BACKSTOP_SECONDS = 2.0
# Delay before a hanging rank other than 0 exits. The exit breaks the collectives of all ranks, so
# rank 0 must have reported before.
EXIT_SECONDS = 2.0
POLL_SECONDS = 0.2
STOPPED_SECONDS = 2.0  # if a poll is later than this, the process was stopped, not just slow
LAUNCHER_PID = "VIL_LAUNCHER_PID"  # process of a sweep that started this run
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/")


class PreemptionGuard:
    """A guard that records signals and, after a call of `watch`, ends the process if it hangs.

    Use it as `with PreemptionGuard(dist) as guard:`. hang_seconds: time without progress (see
    `beat`) after which the process is ended; 0 for no limit. grace_seconds: the limit after a
    signal.
    """

    def __init__(self, dist: DistInfo, *, hang_seconds: float = 0.0, grace_seconds: float = 30.0):
        self.dist, self.hang_seconds, self.grace_seconds = dist, hang_seconds, grace_seconds
        self.received_signal = 0  # the signal that this process received, 0: none
        self.signal_time = self.progress_time = 0.0
        self.is_waiting = self.is_saving = False
        self.folder: Path | None = None
        self.status: Callable[[str, int, str], None] = lambda *_: None
        self.handlers: dict[int, Any] = {}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._monitor, name="guard", daemon=True)

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            self.handlers = set_handlers(self._record)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.closed.set()
        self.thread.join()  # first, because it may arm the backstop again
        faulthandler.cancel_dump_traceback_later()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def watch(self, folder: Path, status: Callable[[str, int, str], None]) -> None:
        """Start to watch for hanging steps. folder: the run's folder. status: function that is
        called as status(state, exit code, reason) before the process is ended by force."""
        self.folder, self.status = folder, status
        self.beat()

    def beat(self) -> None:
        """Report progress: a training step or an evaluation batch has finished."""
        self.progress_time = time.monotonic()
        self._arm_backstop()
        self._restore_handlers()

    def _arm_backstop(self) -> None:
        if self.hang_seconds and self.folder:
            timeout = 2 * self.hang_seconds + BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(timeout, exit=True, file=2)

    def _restore_handlers(self) -> None:
        """Install the signal handlers again, unless Python code has replaced them.

        Compilers for GPUs contain LLVM, which may replace the handler of SIGUSR1 in C. Python does
        not notice. On an H200, the signal was lost in the first run of a process.
        """
        for number in self.handlers:
            if signal.getsignal(number) == self._record:
                signal.signal(number, self._record)

    def check_all_ranks(self) -> None:
        """Raise StoppedError on all ranks if any rank received a signal. All ranks must call
        this."""
        self.beat()
        self.raise_if_stopped(all_reduce_max(self.received_signal))

    def raise_if_stopped(self, number: int) -> None:
        """Raise StoppedError unless `number` is 0. number: the number of the received signal, or 0
        for none; must be the same on all ranks."""
        if number:
            raise StoppedError(signal.Signals(number))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context for code that waits for data. In this context, a signal raises
        StoppedError immediately if the run has a single process.
        """
        self.is_waiting = self.dist.world == 1
        try:
            if self.is_waiting:
                self.raise_if_stopped(self.received_signal)
            yield
        finally:
            self.is_waiting = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context for saving a checkpoint, in which `grace_seconds` is not applied.

        Otherwise, if the disk is slow, the process would be ended before the checkpoint is written.
        """
        self.is_saving = True
        try:
            yield
        finally:
            self.beat()
            self.is_saving = False

    def _record(self, number: int, frame: object) -> None:
        """Signal handler: record the first signal. A later signal ends the process if it arrives
        more than REPEAT_SECONDS after the first."""
        # nothing is saved here, because the signal may arrive in the middle of a collective
        now = time.monotonic()
        if not self.received_signal:
            self.received_signal, self.signal_time = number, now
        elif now - self.signal_time > REPEAT_SECONDS:
            self._exit(f"a second {signal.Signals(number).name}")
        if self.is_waiting:
            self.raise_if_stopped(self.received_signal)

    def _monitor(self) -> None:
        """Run the watchdog thread: end the process if a deadline has passed."""
        before, launcher = time.monotonic(), launcher_pid()
        while not self.closed.wait(POLL_SECONDS):
            now = time.monotonic()
            if (stopped := now - before - POLL_SECONDS) > STOPPED_SECONDS:  # by SIGSTOP
                self.progress_time += stopped
                self.signal_time += stopped
                if self.progress_time:
                    self._arm_backstop()
            before = now
            if launcher and os.getppid() != launcher and not self.received_signal:
                self.received_signal, self.signal_time = signal.SIGTERM, now
                ended = "the process that started it (torchrun or a sweep) has ended"
                echo_error(f"vil: rank {self.dist.rank} stops, because {ended}")
            if self.folder and 0 < self.hang_seconds < now - self.progress_time:
                self._exit(f"no step in {self.hang_seconds:g} s", hung=True)
            since = max(self.signal_time, self.progress_time)
            is_overdue = now - since > self.grace_seconds and not self.is_saving
            if self.received_signal and is_overdue:
                name = signal.Signals(self.received_signal).name
                self._exit(f"{name} received, and no step within {self.grace_seconds:g} s")

    def _exit(self, reason: str, *, hung: bool = False) -> None:
        """Report `reason` and the stacks of all threads, then end the process immediately. There is
        no cleanup, because cleanup could hang as well.

        hung: whether the reason is a hanging step instead of a signal. Determines the exit code.
        """
        stop = StoppedError(signal.Signals(self.received_signal or signal.SIGTERM))
        state, code = ("hung", HUNG) if hung else (stop.state, stop.exit_code)
        reason = f"rank {self.dist.rank}: {reason}; {describe_position()}"
        faulthandler.dump_traceback_later(2 * EXIT_SECONDS, exit=True, file=2)
        echo_error(f"vil: {reason}")
        with contextlib.suppress(Exception):  # no failure here may keep the process alive
            faulthandler.dump_traceback(file=2)
            if self.folder:
                file = self.folder / "crash" / f"stacks-rank{self.dist.rank}.txt"
                file.parent.mkdir(exist_ok=True)
                with file.open("w") as stream:
                    faulthandler.dump_traceback(file=stream)
            self.status(state, code, reason)
            if hung and not self.dist.is_main:
                time.sleep(EXIT_SECONDS)  # rank 0 reports the hang before its collectives break
        os._exit(code)


def set_handlers(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Set the handler of all SIGNALS, except for a SIGHUP that nohup lets the process ignore.
    Returns {signal: its handler before}."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in {*SIGNALS} - ignored}


def launcher_pid() -> int:
    """Return the process id of the launcher (torchrun or a sweep), or 0 if there is none. The run
    stops when its launcher ends."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.getppid()
    return int(os.environ.get(LAUNCHER_PID, 0))


def describe_position() -> str:
    """Describe where the main thread is, for a message: its innermost frame outside torch, and
    whether the thread waits for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    waits = any(part in line.filename for line in stack for part in COLLECTIVES)
    line = next((x for x in reversed(stack) if "/torch/" not in x.filename), stack[-1])
    verb = "waits for other ranks" if waits else "is"
    return f"its main thread {verb} in {line.name} ({line.filename}:{line.lineno})"
