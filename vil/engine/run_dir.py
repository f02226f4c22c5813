"""The folder of one run: locked while in use, and telling afterwards how it was made and ended.

run.lock      held by the process that writes here; a second one is refused
command.txt   every command that ran here       env.txt   versions, device, git commit of each
status.json   {state, code, step, checkpoint, reason, time}, for schedulers (torchrun returns 1
              for every failure) and for people
log.txt metrics.jsonl tb/ checkpoints/           see log.py and state.py
"""

import fcntl
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import metadata
from pathlib import Path

import torch

from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.logger import RunLogger
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.errors import INTERRUPTED, RunFolderError, RunInUseError, StoppedError

PACKAGES = ("vil", "torch", "torchvision", "timm", "yacs", "numpy", "safetensors", "triton")


class RunDir:
    """The folder of a run: `with RunDir(folder, dist, device) as run:` opens it and, at the
    end, writes the run's outcome.

    Only rank 0 touches the disk.
    """

    def __init__(self, folder: str | Path, dist: DistInfo, device: torch.device):
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"
        self.writes = dist.is_main
        self.step = 0
        if self.writes:
            self.lock = take(self.folder)
        self.log = RunLogger(self.folder, enabled=self.writes)
        self.dist, self.device = dist, device
        self.begun = False
        self.ended_by: BaseException | None = None  # what ended the run, if it is not raised

    def begin(self) -> None:
        """Steps follow. Until then the folder's record of an earlier attempt stays as it is."""
        self.begun = True
        if self.writes:
            with refused(self.folder):
                append(self.folder / "command.txt", shlex.join(sys.argv))
                append(self.folder / "env.txt", environment(self.dist, self.device))
        self.status("running")

    def write(self, name: str, text: str) -> None:
        """Replace a small file of the folder; RunFolderError where that cannot be."""
        if self.writes:
            with refused(self.folder / name):
                replace_text(self.folder / name, text)

    def tick(self, step: int) -> None:
        """`step` steps are done."""
        self.step = step
        self.log.tick(step)

    def status(self, state: str, code: int | None = None, reason: str = "") -> None:
        """Replace status.json. `code` is the exit code, null while the run goes on. A full disk
        costs the file, not the run."""
        last = resolve_link(self.checkpoints, "last")
        facts = {
            "state": state,
            "code": code,
            "step": self.step,
            "checkpoint": str(last) if last else None,
            "reason": reason,
            "time": now(),
        }
        try:
            self.write("status.json", json.dumps(facts, indent=1) + "\n")
        except RunFolderError as error:
            print(f"vil: {error}", file=sys.stderr, flush=True)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.log.close()
        if self.begun:
            self.status(*outcome(error or self.ended_by))
        if self.writes:
            self.lock.close()


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """RunFolderError, which names the path, for what the system refuses to write."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunFolderError(f"{path} cannot be written: {reason}") from error


def outcome(error: BaseException | None) -> tuple[str, int, str]:
    """State, exit code and reason of a run that ended with `error`."""
    if error is None:
        return "finished", 0, ""
    if isinstance(error, StoppedError):
        return error.state, error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED, "Ctrl-C"
    return "failed", getattr(error, "exit_code", 1), f"{type(error).__name__}: {error}"


def take(folder: Path):
    """The lock of the folder, which is made if need be. RunInUseError, RunFolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        return lock(folder / "run.lock")
    except OSError as error:
        reason = f"{error.strerror or error}; choose another --output_dir"
        raise RunFolderError(f"{folder} cannot be the folder of a run: {reason}") from error


def refuse_links(folder: Path) -> None:
    """RunFolderError for a link to a file: in a folder from somebody else it would make us write
    into a file elsewhere. Links to folders (checkpoints on another disk) are fine."""
    for link in (*folder.glob("*"), *folder.glob("*/*")):
        if link.is_symlink() and not link.is_dir():
            raise RunFolderError(f"{link} is a link: remove it, a run writes files of its own only")


def lock(file: Path):
    """Hold `file` until it is closed or the process is gone; RunInUseError if another one does.

    A POSIX record lock: the workers of a killed run, which may outlive it for seconds, do not
    inherit it, so a restart is not refused.
    """
    stream = file.open("a+")
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"  # which has not written its name yet
        message = f"{file.parent} is in use by {holder}: choose another --output_dir"
        raise RunInUseError(message) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    stream.flush()
    return stream


def append(file: Path, text: str) -> None:
    """Add a dated entry: a run that was resumed has several."""
    with file.open("a", **TEXT) as stream:
        stream.write(f"# {now()}\n{text}\n")


def environment(dist: DistInfo, device: torch.device) -> str:
    """What the numbers of this run may depend on, one fact per line."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    facts = [
        f"python {platform.python_version()} on {platform.platform()}, {socket.gethostname()}",
        *versions,
        f"device {device.type} {name}, cuda {torch.version.cuda}",
        f"ranks {dist.world}, threads {torch.get_num_threads()}, cores {os.cpu_count()}",
        f"git {git_commit()}",
    ]
    return "\n".join(facts)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """The commit of the source tree this file lies in, with -dirty if it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return answer.stdout.strip() or "none"


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
