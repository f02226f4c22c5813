"""Start small real runs of the command, and wait for, signal or end them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.common.small_runs import command, environment
from vil.engine.checkpoint.save_load import newest_step

INJECTED = str(Path(__file__).with_name("injected.py"))
ENDLESS = ("OPTIM.EPOCHS=400", "RUN.SAVE_EVERY=400", "OPTIM.EMA=0.9")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a restart may meet old addresses
DEADLINE = 300  # of a run that hangs; four starts in one took 36 s alone, over 90 s under load


def begin(folder, *words, dist=1, launcher=(), fault=None, **environ):
    """Start a run in its own process group. Its output goes to <folder>.log."""
    line = command("train", *words, "--output_dir", folder)
    if dist > 1:
        line = [*LAUNCHER, *launcher, "-m", *line[2:]]
    if fault:
        line += ["--import", INJECTED]
        environ["FAULT"] = json.dumps(fault)
    with open(f"{folder}.log", "w") as log:
        process = subprocess.Popen(
            line, env=environment(**environ), stdout=log, stderr=log, start_new_session=True
        )
    process.log = Path(log.name)
    return process


def finish(folder, *words, code=0, **options):
    """Run until the end, with an exit code. Returns the number of processes left behind."""
    process = begin(folder, *words, **options)
    wait_for_end(process)
    alive = end_all(process)
    assert process.returncode == code, said(folder)
    return alive


def said(folder) -> str:
    return Path(f"{folder}.log").read_text()


def status(folder) -> dict:
    file = Path(folder, "status.json")
    return json.loads(file.read_text()) if file.exists() else {}


def wait_until(is_true, process, folder):
    """Wait until `is_true()`, while the process lives."""
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.02)


def wait_until_running(process, folder):
    """Wait until the run is about to do its first step."""
    wait_until(lambda: status(folder).get("state") == "running", process, folder)


def wait_for_steps(process, folder):
    """Wait until the run has logged a step."""
    log = Path(folder, "metrics.jsonl")
    wait_until(lambda: log.exists() and log.stat().st_size, process, folder)


def wait_for_end(process):
    """Wait for a run that `begin` started. If it hangs, end it and show its output."""
    try:
        process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        end_all(process)
        raise AssertionError(f"hangs after {DEADLINE} s:\n{process.log.read_text()}") from None


def repeats(full: int) -> int:
    """How often to repeat a fault: `full` times with $VIL_FAULTS_FULL, else a third as often."""
    return full if os.environ.get("VIL_FAULTS_FULL") else max(2, full // 3)


def variants(every: Sequence, few: int) -> Sequence:
    """The variants of a fault: all of them with $VIL_FAULTS_FULL, else the first few."""
    return every if os.environ.get("VIL_FAULTS_FULL") else every[:few]


def left_over(group: int) -> list[int]:
    """Return the processes of a group that are still alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def end_all(process) -> int:
    """Wait until no process of a run's group is alive. Those that are alive after ten seconds are
    killed. Returns their number."""
    deadline = time.monotonic() + 10
    while (alive := left_over(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return len(alive)


def saved_step(folder) -> int:
    return newest_step(Path(folder, "checkpoints"))
