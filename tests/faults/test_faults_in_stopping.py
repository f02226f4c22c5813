"""Signals at any time: the run saves its current step, on all ranks, and leaves no processes. A
rank that hangs ends the job."""

import os
import random
import signal
import time

from tests.common.faults.real_runs import (
    ENDLESS,
    begin,
    end_all,
    said,
    saved_step,
    status,
    wait_for_end,
    wait_for_steps,
    wait_until_running,
)
from tests.common.faults.records import record, repeats
from tests.common.small_runs import TINY
from tests.common.small_tasks import words_of
from tests.common.toy_engine import Troubled, held_out, toy_train
from vil.tasks import TASKS
from vil.utils.errors import StoppedError

SETS = {"odd": held_out(3610, size=4)}  # its evaluation takes about as long as the five steps


def endless(number, folder):
    """Return the settings of a run that does not end, cycling through the tasks."""
    return (*words_of(list(TASKS)[number % len(TASKS)], folder), *ENDLESS)


def toy_for_ever(folder):
    try:
        toy_train(folder, epochs=10**6, task=Troubled(0, folder, {}, SETS))
    except StoppedError as stop:
        return stop.exit_code


def toy_in_a_fork(folder):
    """Fork this process, which has imported torch, so the run starts at once."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = toy_for_ever(folder)
        finally:
            os._exit(code)
    return child


def test_f5_twenty_sigterms_at_random_moments(tmp_path):
    draw, saved = random.Random(0), 0
    for number in range(12):
        folder = tmp_path / f"light {number}"
        child = toy_in_a_fork(folder)
        while status(folder).get("state") != "running":
            time.sleep(0.01)
        time.sleep(draw.random())
        os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        saved += code == 75 and saved_step(folder) == status(folder)["step"]
    real = repeats(8)
    for number in range(real):
        folder = tmp_path / f"real {number}"
        process = begin(folder, *endless(number, folder), f"DATALOADER.WORKERS={number % 2}")
        wait_until_running(process, folder)
        time.sleep(3 * draw.random())
        process.send_signal(signal.SIGTERM)
        wait_for_end(process)
        saved += process.returncode == 75 and saved_step(folder) == status(folder)["step"]
        end_all(process)
    what = f"SIGTERMs that save a checkpoint of the current step (of {12 + real})"
    record("F5", what, saved, 12 + real)
    record("F5", "exit code in status.json", status(folder)["code"], 75)


def test_f6_a_signal_to_the_whole_group_with_workers(tmp_path):
    orphans, count = 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        process = begin(folder, *endless(number, folder), "DATALOADER.WORKERS=2")
        wait_until_running(process, folder)
        wait_for_steps(process, folder)  # the workers have started
        os.killpg(process.pid, signal.SIGTERM)
        wait_for_end(process)
        orphans += end_all(process)
        assert process.returncode == 75, said(folder)
        assert saved_step(folder) == status(folder)["step"]
    record("F6", "processes left behind", orphans, 0)


def test_f30_a_flag_on_one_of_two_ranks(tmp_path):
    right, count = 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        fault = {"what": "signal", "rank": 1, "step": 3 + number}
        process = begin(folder, *endless(number, folder), dist=2, fault=fault)
        wait_for_end(process)
        end_all(process)
        right += saved_step(folder) == fault["step"] + 1 and status(folder)["code"] == 75
    what = f"runs in which both ranks stop at the step of the signal (of {count})"
    record("F30", what, right, count)


def test_f8_a_rank_that_hangs(tmp_path):
    named, count = 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        fault = {"what": "sleep", "rank": number % 2, "step": 5}
        words = (*TINY, "OPTIM.EPOCHS=40", "RUN.HANG_SECONDS=4")
        process = begin(folder, *words, dist=2, fault=fault)
        wait_for_end(process)
        end_all(process)
        text = said(folder)
        named += f"rank {number % 2}: no step in 4 s; its main thread is in lie_down" in text
        assert status(folder)["code"] == 6
    what = f"hanging ranks reported with the function in which they hang (of {count})"
    record("F8", what, named, count)
