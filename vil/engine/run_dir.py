"""The folder of one run: locked while in use, with a record of how it was made and how it ended.

run.lock      held by the process that writes here; a second one is refused
command.txt   every command that ran here       env.txt   versions, device, git commit of each
status.json   {state, code, step, checkpoint, reason, time}, for people and schedulers (torchrun
              returns 1 for every failure)
log.txt metrics.jsonl tb/ checkpoints/           see logger.py and checkpoint/save_load.py
"""

import fcntl
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch

from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.logger import RunLogger
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.errors import INTERRUPTED, RunFolderError, RunInUseError, StoppedError, os_error_as
from vil.utils.machine import version

PACKAGES = ("vil", "torch", "torchvision", "timm", "yacs", "numpy", "safetensors", "triton")


class RunDir:
    """The folder of a run. Only rank 0 writes files.

    `with RunDir(folder, dist, device) as run:` locks it and, at the end, writes the outcome.
    """

    def __init__(self, folder: str | Path, dist: DistInfo, device: torch.device):
        self.folder, self.dist, self.device = Path(folder), dist, device
        self.checkpoints = self.folder / "checkpoints"
        self.writes, self.step, self.begun = dist.is_main, 0, False
        if self.writes:
            self.lock = open_folder(self.folder)
        self.log = RunLogger(self.folder, enabled=self.writes)
        self.ended_by: BaseException | None = None  # what ended the run, if it is not raised

    def begin(self) -> None:
        """Record the start of training. Until then an earlier attempt's files stay unchanged."""
        self.begun = True
        if self.writes:
            with os_error_as(RunFolderError, f"{self.folder} cannot be written"):
                append(self.folder / "command.txt", shlex.join(sys.argv))
                append(self.folder / "env.txt", environment(self.dist, self.device))
        self.status("running")

    def write(self, name: str, text: str) -> None:
        """Replace a small file of the folder. Raises RunFolderError if that fails."""
        if self.writes:
            with os_error_as(RunFolderError, f"{self.folder / name} cannot be written"):
                replace_text(self.folder / name, text)

    def tick(self, step: int) -> None:
        """Record that `step` steps are done."""
        self.step = step
        self.log.tick(step)

    def status(self, state: str, code: int | None = None, reason: str = "") -> None:
        """Replace status.json. `code` is the exit code, None during the run. A full disk is
        reported and does not end the run."""
        last = resolve_link(self.checkpoints, "last")
        checkpoint = str(last) if last else None
        status = dict(state=state, code=code, step=self.step, checkpoint=checkpoint)
        status |= dict(reason=reason, time=now())
        try:
            self.write("status.json", json.dumps(status, indent=1) + "\n")
        except RunFolderError as error:
            print(f"vil: {error}", file=sys.stderr, flush=True)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        self.log.close()
        if self.begun:
            self.status(*outcome(error or self.ended_by))
        if self.writes:
            self.lock.close()


def outcome(error: BaseException | None) -> tuple[str, int, str]:
    """State, exit code and reason of a run that ended with `error`."""
    if error is None:
        return "finished", 0, ""
    if isinstance(error, StoppedError):
        return error.state, error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED, "Ctrl-C"
    return "failed", getattr(error, "exit_code", 1), f"{type(error).__name__}: {error}"


def open_folder(folder: Path) -> TextIO:
    """Create the folder if necessary and lock it. Raises RunInUseError or RunFolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        return lock(folder / "run.lock")
    except OSError as error:
        reason = f"{error.strerror or error}; choose another --output_dir"
        raise RunFolderError(f"{folder} cannot be the folder of a run: {reason}") from error


def refuse_links(folder: Path) -> None:
    """Raise RunFolderError for a link to a file: a folder that someone else made could redirect our
    writes. Links to folders (checkpoints on another disk) are allowed."""
    for link in (*folder.glob("*"), *folder.glob("*/*")):
        if link.is_symlink() and not link.is_dir():
            raise RunFolderError(f"{link} is a link: remove it, a run writes only to its own files")


def lock(file: Path) -> TextIO:
    """Lock `file` until it is closed or the process ends. Raises RunInUseError if it is locked.

    A POSIX record lock is not inherited by loader workers, which may outlive a killed run for
    seconds and would block a restart.
    """
    stream = file.open("a+")
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"  # which did not write its name yet
        message = f"{file.parent} is in use by {holder}: choose another --output_dir"
        raise RunInUseError(message) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    stream.flush()
    return stream


def append(file: Path, text: str) -> None:
    """Append a dated entry: one for each start of the run."""
    with file.open("a", **TEXT) as stream:
        stream.write(f"# {now()}\n{text}\n")


def environment(dist: DistInfo, device: torch.device) -> str:
    """All that the results may depend on, one item per line."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = "\n".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"python {platform.python_version()} on {platform.platform()}, {socket.gethostname()}\n"
        f"{versions}\ndevice {device.type} {name}, cuda {torch.version.cuda}\n"
        f"ranks {dist.world}, threads {torch.get_num_threads()}, cores {os.cpu_count()}\n"
        f"git {git_commit()}"
    )


def git_commit() -> str:
    """The commit of the source tree that this file is in, with -dirty if it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.decode().strip() or "none"


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
