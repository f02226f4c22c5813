"""The other processes of a run on a CPU, started here where no launcher did."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import vil
from vil.build import refuses
from vil.engine.distributed import PLACE, read_environment

LAST_SECONDS = 60  # for the others to end after this one


class ProcessError(RuntimeError):
    """Another process of the run has failed: with an exit code of ours, or below 0 by a signal."""

    def __init__(self, rank: int, code: int):
        how = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
        super().__init__(f"process {rank} of the run {how}")
        self.exit_code = code if code > 0 else 1


@contextmanager
def sharing_cpu(processes: int, device: torch.device, command: Sequence[str]) -> Iterator[None]:
    """Inside, this process is rank 0 of `processes`; the others run `vil command`.

    They share the threads of this one, and are no more than these. On another device, and where
    torchrun has started this process, nothing is done. Raises ProcessError where another failed.
    """
    refuses(read_environment)(os.environ)
    threads = torch.get_num_threads()
    processes = min(processes, threads)
    if processes == 1 or device.type != "cpu" or any(name in os.environ for name in PLACE):
        yield
        return
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting |= {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": str(threads // processes)}
    first, *rest = ({**meeting, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes))
    others = [start(command, place) for place in rest]
    before = {name: os.environ.get(name) for name in first}
    os.environ.update(first)
    torch.set_num_threads(threads // processes)
    try:
        yield
        refuse_failed(others)
    except Exception as error:
        if not hasattr(error, "exit_code"):  # a lost connection tells less than why it was lost
            refuse_failed(others)
        raise
    finally:
        for process in others:
            process.kill()
            process.wait()
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def start(command: Sequence[str], place: Mapping[str, str]) -> subprocess.Popen:
    """`vil command` by this very package, at its place among the processes."""
    path = [str(Path(vil.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, **place, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen([sys.executable, "-m", "vil", *command], env=own)


def refuse_failed(others: Sequence[subprocess.Popen]) -> None:
    """Wait for the others; ProcessError for the first that failed."""
    for rank, process in enumerate(others, start=1):
        if code := process.wait(LAST_SECONDS):
            raise ProcessError(rank, code)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
