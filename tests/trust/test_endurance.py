"""One run that is killed and stopped thirty times, and one of three thousand steps."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from tests.common.faults.real_runs import (
    DEADLINE,
    begin,
    end_all,
    said,
    saved_step,
    seconds_to_end,
    status,
)
from tests.common.faults.same_runs import EVERYTHING, equal_digests
from tests.common.small_runs import TINY, metrics

pytestmark = [pytest.mark.slow, pytest.mark.trust(2)]
EPOCHS, PER_EPOCH = 60, 6
WORDS = (
    *EVERYTHING, f"OPTIM.EPOCHS={EPOCHS}", "DATA.KWARGS.n=96", "DATALOADER.WORKERS=2",
    "RUN.HANG_SECONDS=20", "--resume",
)  # fmt: skip
KILLS, STOPS = 20, 10


def wait_for_steps(process, folder, more):
    """Wait until a run has logged some steps, or has ended."""
    begin_step, end = logged(folder), time.monotonic() + DEADLINE
    while process.poll() is None and logged(folder) < begin_step + more:
        assert time.monotonic() < end, said(folder)
        time.sleep(0.05)


def logged(folder):
    lines = metrics(folder, "train") if (folder / "metrics.jsonl").exists() else []
    return lines[-1]["step"] if lines else 0


def test_twenty_kills_and_ten_stops_at_random_moments(tmp_path):
    """Each start is killed a random time after a random number of steps, some while they start."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    process = begin(whole, *WORDS)
    seconds_to_end(process)
    assert process.returncode == 0, said(whole)
    draw, kills, stops = random.Random(0), 0, 0
    while kills < KILLS:
        process = begin(folder, *WORDS)
        if draw.random() < 0.8:
            wait_for_steps(process, folder, draw.randrange(1, 6))
        time.sleep(draw.uniform(0, 1.5))
        if stops < STOPS and draw.random() < 0.7 and process.poll() is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 2))
            os.kill(process.pid, signal.SIGCONT)
            stops += 1
            time.sleep(draw.uniform(0, 1))
        assert process.poll() is None, said(folder)  # else the run is too short for the kills
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        end_all(process)
        kills += 1
    while stops < STOPS or process.returncode:
        process = begin(folder, *WORDS)
        while process.poll() is None:
            time.sleep(draw.uniform(0.2, 2))
            if stops < STOPS and process.poll() is None:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(draw.uniform(0.1, 2))
                os.kill(process.pid, signal.SIGCONT)
                stops += 1
        assert process.returncode == 0, said(folder)
    assert saved_step(folder) == EPOCHS * PER_EPOCH
    assert equal_digests(folder, whole) == 4
    resumed = (folder / "log.txt").read_text().count("resuming from")
    print(f"{kills} kills, {stops} stops, {resumed} times resumed from a checkpoint")


def use_of(pid):
    """Resident KiB, open files and threads of a process."""
    with open(f"/proc/{pid}/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return int(fields["VmRSS"].split()[0]), files, int(fields["Threads"])


def test_three_thousand_steps_with_three_hundred_evaluations(tmp_path):
    """Memory, open files and threads of the last third are those of the second."""
    folder, epochs, per_epoch = tmp_path / "run", 300, 10
    words = (*TINY, f"OPTIM.EPOCHS={epochs}", "DATA.KWARGS.n=160", "DATALOADER.WORKERS=2")
    process, used = begin(folder, *words, "RUN.EVAL_EVERY=1", "LOG_FREQ=10"), []
    while process.poll() is None:
        now = status(folder)
        with suppress(OSError, KeyError):  # it ends, or has just begun
            if now["state"] == "running":  # a process that ends touches most of its pages again
                used.append((now["step"], *use_of(process.pid)))
        time.sleep(0.2)
    assert process.returncode == 0, said(folder)
    assert len(metrics(folder, "val")) == epochs
    third = epochs * per_epoch / 3
    most = [
        [max(column) for column in zip(*(row[1:] for row in used if low < row[0] <= low + third))]
        for low in (third, 2 * third)
    ]
    print(f"KiB, files, threads of the second and the last third: {most}")
    (memory, files, threads), (memory_then, files_then, threads_then) = most
    assert memory_then < memory * 1.02
    assert files_then <= files + 1
    assert threads_then <= threads
