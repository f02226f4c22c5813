"""Train the runs of a sweep in processes of `vil train`, several at a time.

If a run crashes, the other runs continue. On a signal to stop the sweep, the runs save their state
and exit. If the process of the sweep is killed, the runs stop, except those started by torchrun.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vil.config.plugins import PREFIX as PLUGIN
from vil.engine.preemption import LAUNCHER_PID, SIGNALS
from vil.engine.run_dir import is_locked
from vil.utils.atomic_write import TEXT
from vil.utils.errors import StoppedError
from vil.utils.machine import affinity, now
from vil.workflows.sweeping.plan import SweepRun
from vil.workflows.sweeping.state import begin_attempt, end_attempt

POLL_SECONDS = 0.1
# How long to wait for a run whose folder another process locks. After a sweep is killed, its runs
# may still be saving their state.
LOCKED_SECONDS = 60.0


@dataclass
class Attempt:
    """Training process of one run of a sweep. began: time when the process started, from
    `time.time`."""

    run: SweepRun
    process: subprocess.Popen
    began: float


class RunPool:
    """Pool that trains the runs of a sweep, `jobs` at a time, with equal shares of the CPU cores.

    num_processes: number of processes of each run, started by torchrun if there are several.
    devices: GPUs for CUDA_VISIBLE_DEVICES, divided among the runs that train at the same time; if
    empty, this variable is not changed.
    """

    def __init__(
        self,
        jobs: int,
        num_processes: int,
        devices: Sequence[str],
        *,
        on_begin: Callable[[SweepRun], None],
        on_end: Callable[[SweepRun], None],
    ):
        self.jobs, self.num_processes, self.devices = jobs, num_processes, devices
        self.on_begin, self.on_end = on_begin, on_end
        self.active: dict[int, Attempt] = {}  # by slot
        self.signal = 0  # the first signal that was received

    def train(self, runs: Sequence[SweepRun]) -> int:
        """Train or resume runs. Returns the number of the signal that stopped the training, or 0.

        A run whose folder is locked by another process is tried again after the other runs, and
        skipped if the folder is still locked after LOCKED_SECONDS.
        """
        waiting, deadline = deque(runs), time.monotonic() + LOCKED_SECONDS
        with self._signals():
            while self.active or (waiting and not self.signal):
                if not self._start_next(waiting):
                    if not self.active and time.monotonic() > deadline:
                        break
                    time.sleep(POLL_SECONDS)
                if self._reap():
                    deadline = time.monotonic() + LOCKED_SECONDS
        return self.signal

    def _start_next(self, waiting: deque[SweepRun]) -> bool:
        """Start the next run whose folder is not locked by another process, if fewer than `jobs`
        runs are active. Returns whether a run was started."""
        slot = next((slot for slot in range(self.jobs) if slot not in self.active), None)
        for _ in range(0 if slot is None or self.signal else len(waiting)):
            run = waiting.popleft()
            if not is_locked(run.folder):
                self.active[slot] = self._start(run, slot)
                if self.signal:  # it arrived during `_start`
                    self._pass_on(self.signal)
                return True
            waiting.append(run)
        return False

    def _start(self, run: SweepRun, slot: int) -> Attempt:
        command = train_command(run, self.num_processes)
        self.on_begin(run)
        began = begin_attempt(run)
        with run.output_file.open("a", **TEXT) as stream:
            stream.write(f"# {now()} {shlex.join(command)}\n")
            stream.flush()
            environment = self._environment(slot)
            words = dict(stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)
            return Attempt(run, subprocess.Popen(command, **words), began)

    def _environment(self, slot: int) -> dict[str, str]:
        """Return the environment variables of a run's process, which set its threads and GPUs.

        Without torchrun, they also have the id of the sweep's process, so that the run stops if the
        sweep is killed. slot: index of the run among those that train at the same time.
        """
        own = {}
        if self.jobs * self.num_processes > 1:
            given = os.environ.get("OMP_NUM_THREADS", "")
            cores = int(given) if given.isdecimal() else len(affinity())
            own["OMP_NUM_THREADS"] = str(max(1, cores // (self.jobs * self.num_processes)))
        if self.num_processes == 1:  # torchrun's processes watch torchrun
            own[LAUNCHER_PID] = str(os.getpid())
        if self.devices and self.jobs > 1:
            first = slot * self.num_processes
            names = [
                self.devices[(first + i) % len(self.devices)] for i in range(self.num_processes)
            ]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(names))
        return {**os.environ, **own}

    def _reap(self) -> bool:
        """Record the outcome of each run whose process has exited. Returns whether any process has
        exited since the last call."""
        ended = [slot for slot, a in self.active.items() if a.process.poll() is not None]
        for slot in ended:
            attempt = self.active.pop(slot)
            returncode = attempt.process.returncode
            if returncode and self.signal:  # stopped by the signal
                returncode = StoppedError(signal.Signals(self.signal)).exit_code
            end_attempt(attempt.run, returncode, attempt.began)
            self.on_end(attempt.run)
        return bool(ended)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Context manager that forwards the signals in SIGNALS to the active runs. Outside the main
        thread, it does nothing, because Python allows no signal handlers in other threads."""
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: object) -> None:
        self.signal = self.signal or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        # SIGUSR1 would kill torchrun; a run handles SIGTERM in the same way
        passed = signal.SIGTERM if number == signal.SIGUSR1 else number
        for attempt in list(self.active.values()):
            if attempt.process.poll() is None:
                attempt.process.send_signal(passed)


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use. These are the items of CUDA_VISIBLE_DEVICES or, if
    this variable is not set, the indices of all GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def train_command(run: SweepRun, num_processes: int) -> list[str]:
    """Return the command line, as a list of words, that trains or resumes a run. num_processes: if
    there are several, the command uses torchrun."""
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={num_processes}"]
    words = ["-m", "vil", "train", "--config-file", str(run.config_file)]
    words += ["--output_dir", str(run.folder), "--resume"]
    imports = [name for name in run.cfg.IMPORTS if not name.startswith(PLUGIN)]
    return [*launcher, *words, *(word for name in imports for word in ("--import", name))]
