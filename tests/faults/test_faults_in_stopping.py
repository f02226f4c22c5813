"""Signals at any time: the run saves its current step, on all ranks, and leaves no processes. A
rank that hangs ends the job."""

import os
import random
import signal
import time

import pytest

from tests.common.faults.real_runs import (
    ENDLESS,
    begin,
    end_all,
    finish,
    repeats,
    said,
    saved_step,
    status,
    variants,
    wait_for_end,
    wait_for_steps,
    wait_until_running,
)
from tests.common.small_runs import TINY
from tests.common.small_tasks import words_of
from vil.tasks import TASKS


def endless(number, folder):
    """Return the settings of a run that does not end, cycling through the tasks."""
    return (*words_of(list(TASKS)[number % len(TASKS)], folder), *ENDLESS)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_sigterm_to_runs_of_every_task(workers, tmp_path):
    """To the process, or with two workers to the whole group, once the workers have started."""
    draw = random.Random(workers)
    for number in range(repeats(5)):
        folder = tmp_path / str(number)
        process = begin(folder, *endless(number, folder), f"DATALOADER.WORKERS={workers}")
        wait_until_running(process, folder)
        if workers == 2:
            wait_for_steps(process, folder)
            os.killpg(process.pid, signal.SIGTERM)
        else:
            time.sleep(3 * draw.random())
            process.send_signal(signal.SIGTERM)
        wait_for_end(process)
        assert end_all(process) == 0, "no process is left behind"
        assert process.returncode == status(folder)["code"] == 75, said(folder)
        assert saved_step(folder) == status(folder)["step"]


def test_a_signal_to_one_of_two_ranks(tmp_path):
    for number in range(repeats(5)):
        folder = tmp_path / str(number)
        fault = {"what": "signal", "rank": 1, "step": 3 + number}
        process = begin(folder, *endless(number, folder), dist=2, fault=fault)
        wait_for_end(process)
        end_all(process)
        assert status(folder)["code"] == 75, said(folder)
        assert saved_step(folder) == fault["step"] + 1


@pytest.mark.parametrize("rank", variants([1, 0], 1))
def test_a_rank_that_hangs(rank, tmp_path):
    folder = tmp_path / "run"
    fault = {"what": "sleep", "rank": rank, "step": 5}
    words = (*TINY, "OPTIM.EPOCHS=40", "RUN.HANG_SECONDS=10")  # more than any step takes under load
    finish(folder, *words, dist=2, fault=fault, code=1)  # of torchrun
    assert f"rank {rank}: no step in 10 s; its main thread is in lie_down" in said(folder)
    assert status(folder)["code"] == 6
