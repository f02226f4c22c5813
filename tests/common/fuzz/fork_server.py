"""A process that has imported torch once, and runs each command in a fork of itself with limits."""

import importlib
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
OTHERS = ("torch.utils.tensorboard", "timm", "sklearn.datasets", "matplotlib.pyplot")
SECONDS = 30  # of one command
DATA, FILE = 4 << 30, 64 << 20  # bytes: of memory that a command may take, of a file it writes


class Ended(NamedTuple):
    """How a command ended. memory: its largest resident size in bytes. A code of None: it hung."""

    code: int | None
    out: str
    err: str
    memory: int = 0


class ForkServer:
    """Start it once; `run` is called for each command."""

    def __init__(self, environ: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.fuzz.fork_server"],
            cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, words: list[str], folder: Path) -> Ended:
        """Run a command in `folder`, with its output in files beside it."""
        print(json.dumps([words, str(folder)]), file=self.process.stdin, flush=True)
        code, memory = json.loads(self.process.stdout.readline())
        out, err = (text_of(Path(f"{folder}.{name}")) for name in ("out", "err"))
        return Ended(code, out, err, memory)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


def run_process(words: list[str], folder: Path, environ: dict[str, str]) -> Ended:
    """Run a command as a user would, without the server."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vil", *words], cwd=folder, env=environ, timeout=4 * SECONDS,
            capture_output=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(None, "", "")
    return Ended(done.returncode, *(x.decode(errors="replace") for x in (done.stdout, done.stderr)))


def text_of(file: Path) -> str:
    return file.read_text(errors="replace")


def limit() -> None:
    """Limit this process: time, memory and files. No core files."""
    with open("/proc/self/status") as lines:
        held = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    for name, value in (
        ("DATA", held * 1024 + DATA), ("FSIZE", FILE), ("CORE", 0), ("CPU", SECONDS),
    ):  # fmt: skip
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def child(words: list[str], folder: str) -> None:
    """Run the command in this fork, and leave without cleaning up what the server holds."""
    from vil.cli import main

    os.setsid()
    os.chdir(folder)
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{folder}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, f"{folder}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(name, flags), number)
    limit()
    sys.argv = ["vil", *words]
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int) -> tuple[int | None, int]:
    """Return the exit code and the largest resident size of a child. Kills one that hangs."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)[2]
    return None, usage.ru_maxrss * 1024


def serve() -> None:
    """Answer the requests on standard input. All of the package is imported first."""
    import torch

    import vil

    torch.set_num_threads(1)
    names = [module.name for module in pkgutil.walk_packages(vil.__path__, "vil.")]
    for name in [*names, *OTHERS]:
        if not name.endswith("__main__"):
            with suppress(ImportError):  # of optional packages
                importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, folder = json.loads(line)
        if not (pid := os.fork()):
            try:
                child(words, folder)
            finally:
                os._exit(99)
        print(json.dumps(wait(pid)), file=answers, flush=True)


if __name__ == "__main__":
    serve()
