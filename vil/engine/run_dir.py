"""The folder of a run. It is locked during the run, and records how the run started and ended.

run.lock      locked by the process that writes to the folder; a second process is rejected
command.txt   each command that was run with this folder
env.txt       versions, device and git commit for each of these commands
status.json   {state, code, step, checkpoint, reason, time}, for users and schedulers. code is
              the run's exit code; torchrun itself returns 1 for every failure
log.txt, metrics.jsonl, tb/, checkpoints/
              described in logger.py and checkpoint/save_load.py
"""

import errno
import fcntl
import functools
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.logger import RunLogger
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.console import echo_error
from vil.utils.errors import INTERRUPTED, RunFolderError, RunInUseError, StoppedError, os_error_as
from vil.utils.json_text import read_dict
from vil.utils.machine import now, version

IN_USE = (errno.EWOULDBLOCK, errno.EACCES)  # another process holds a lock
LOCK_ATTEMPTS, LOCK_SECONDS = 5, 0.02  # seconds between attempts
log = logging.getLogger(__name__)
PACKAGES = ("vil", "torch", "torchvision", "timm", "yacs", "numpy", "safetensors", "triton")


class RunDir:
    """The folder of a run. Only rank 0 writes to it.

    Use it as `with RunDir(folder, dist, device) as run:`. This locks the folder, and on exit writes
    the final status.
    """

    def __init__(self, folder: str | Path, dist: DistInfo, device: torch.device):
        self.folder, self.dist, self.device = Path(folder), dist, device
        self.checkpoints = self.folder / "checkpoints"
        self.writes, self.step, self.begun, self.ended = dist.is_main, 0, False, False
        if self.writes:
            self.lock = open_folder(self.folder)
            self.descriptor = os.open(self.folder, os.O_RDONLY)  # for `find_move`
        try:
            with os_error_as(RunFolderError, f"{self.folder / 'log.txt'} cannot be written"):
                self.log = RunLogger(self.folder, enabled=self.writes)
        except BaseException:
            self._close()
            raise
        self.ended_by: BaseException | None = None  # what ended the run, if it is not raised
        self.reason = ""  # why a finished run ended before its last epoch, for status.json
        self.last_error = ""  # the last error in writing status.json

    def begin(self) -> None:
        """Record the start of training in command.txt, env.txt and status.json. Until this call,
        the files of an earlier attempt are not changed."""
        self.begun = True
        if self.writes:
            with os_error_as(RunFolderError, f"{self.folder} cannot be written"):
                append(self.folder / "command.txt", shlex.join(sys.argv))
                append(self.folder / "env.txt", environment(self.dist, self.device))
        self.status("running")

    def find_move(self) -> str:
        """Return a message if the folder was moved or removed since the run started, else ""."""
        if not self.writes:
            return ""
        try:
            if os.path.samestat(self.folder.stat(), os.fstat(self.descriptor)):
                return ""
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # of a network disk, for example, which may work again at the next write
            return ""
        return (
            f"{self.folder} was moved or removed while the run wrote to it: move it back, or give "
            "its new path as --output_dir, and add --resume"
        )

    def write(self, name: str, text: str) -> None:
        """Replace a small text file in the folder. Raises RunFolderError if it cannot be
        written."""
        if self.writes:
            if moved := self.find_move():
                raise RunFolderError(moved)
            with os_error_as(RunFolderError, f"{self.folder / name} cannot be written"):
                replace_text(self.folder / name, text)

    def tick(self, step: int) -> None:
        """Record the number of finished steps."""
        self.step = step
        self.log.tick(step)

    def end(self, reason: str = "") -> None:
        """Record that training is finished. The run's `with` block writes status.json on exit.

        If no step was left to train, a status.json that already says "finished" is not changed.
        reason: why training ended before the last epoch, for the log and status.json; else "".
        """
        self.ended, self.reason = True, reason
        if reason and self.begun:
            self.log.say(reason)

    def status(self, state: str, code: int | None = None, reason: str = "") -> None:
        """Replace status.json. A failure to write is logged and does not end the run.

        state: such as "running" or "finished". code: the exit code; None while the run is active.
        reason: why the run ended.
        """
        last = resolve_link(self.checkpoints, "last")
        checkpoint = str(last) if last else None
        status = dict(state=state, code=code, step=self.step, checkpoint=checkpoint)
        status |= dict(reason=reason, time=now())
        try:
            self.write("status.json", json.dumps(status, indent=1) + "\n")
        except RunFolderError as error:
            if str(error) != self.last_error:  # print the same error only once
                echo_error(f"vil: {error}")
            self.last_error = str(error)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        self.log.close()
        state, code, reason = outcome(error or self.ended_by)
        if self.begun or (self.ended and code == 0 and not self._is_finished()):
            self.status(state, code, reason or self.reason)
        self._close()

    def _close(self) -> None:
        if self.writes:
            self.lock.close()
            os.close(self.descriptor)

    def _is_finished(self) -> bool:
        """Return whether status.json records that the run is finished."""
        return read_dict(self.folder / "status.json").get("state") == "finished"


def outcome(error: BaseException | None) -> tuple[str, int, str]:
    """Convert the error that ended a run, or None for success, to (state, exit code, reason)."""
    if error is None:
        return "finished", 0, ""
    if isinstance(error, StoppedError):
        return error.state, error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED, "Ctrl-C"
    return "failed", getattr(error, "exit_code", 1), f"{type(error).__name__}: {error}"


def open_folder(folder: Path) -> TextIO:
    """Create the folder of a run if necessary, and lock it. Returns the lock file.

    Raises RunInUseError if another process uses the folder, and RunFolderError if the folder cannot
    be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock(folder / "run.lock")
    except OSError as error:
        reason = f"{error.strerror or error}; choose another --output_dir"
        raise RunFolderError(f"{folder} cannot be the folder of a run: {reason}") from error


def lock(file: Path) -> TextIO:
    """Lock a file until the returned file object is closed or the process ends.

    Loader workers do not inherit the lock. Raises RunInUseError if another process holds the lock.
    On a file system without locks, which is logged, the file is not locked.
    """
    stream = file.open("a+")
    try:
        acquire(stream)
    except OSError as error:
        if error.errno not in IN_USE:
            text = "%s cannot be locked (%s): do not start two runs in this folder"
            log.warning(text, file, error.strerror)
            return stream
        stream.seek(0)
        holder = stream.read().strip() or "another process"  # empty if it just took the lock
        message = f"{file.parent} is in use by {holder}: choose another --output_dir"
        raise RunInUseError(message) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    stream.flush()
    return stream


def acquire(stream: TextIO) -> None:
    """Acquire the lock of an open file. Raises OSError if another process still holds it after
    LOCK_ATTEMPTS attempts."""
    for left in reversed(range(LOCK_ATTEMPTS)):  # `is_locked` may hold the lock for a moment
        try:
            # Loader workers can outlive a killed run, but do not inherit a POSIX record lock.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if left == 0 or error.errno not in IN_USE:
                raise
            time.sleep(LOCK_SECONDS)


def is_locked(folder: Path) -> bool:
    """Return whether a run is writing to a folder."""
    try:
        stream = (folder / "run.lock").open("r+")
    except OSError:
        return False
    with stream:  # closing releases the lock
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in IN_USE
    return False


def append(file: Path, text: str) -> None:
    """Append the current time and `text` to a file. Called once per start of the run."""
    with file.open("a", **TEXT) as stream:
        stream.write(f"# {now()}\n{text}\n")


def environment(dist: DistInfo, device: torch.device) -> str:
    """Return the text for env.txt: versions, host, device, ranks, threads, cores and git commit."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = "\n".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"python {platform.python_version()} on {platform.platform()}, {socket.gethostname()}\n"
        f"{versions}\ndevice {device.type} {name}, cuda {torch.version.cuda}\n"
        f"ranks {dist.world}, threads {torch.get_num_threads()}, cores {os.cpu_count()}\n"
        f"git {git_commit()}"
    )


@functools.cache
def git_commit() -> str:
    """Return the git commit of this package's source tree, with "-dirty" for uncommitted changes;
    "none" outside a git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.decode().strip() or "none"
