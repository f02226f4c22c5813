"""Signals at any moment: the run saves where it is, on all ranks, and leaves nothing behind."""

import os
import random
import signal
import statistics
import time

from tests.common.faults.real_runs import (
    ENDLESS,
    begin,
    end_all,
    left_over,
    said,
    saved_step,
    seconds_to_end,
    status,
    wait_until_running,
)
from tests.common.faults.records import record
from tests.common.small_tasks import words_of
from tests.common.toy_engine import Troubled, held_out, toy_train
from vil.tasks import TASKS
from vil.utils.errors import StoppedError

SETS = {"odd": held_out(3610, size=4)}  # its evaluation takes about as long as the five steps


def endless(number, folder):
    """The settings of a run that does not end: of each task in turn."""
    return (*words_of(list(TASKS)[number % len(TASKS)], folder), *ENDLESS)


def toy_for_ever(folder):
    try:
        toy_train(folder, epochs=10**6, task=Troubled(0, folder, {}, SETS))
    except StoppedError as stop:
        return stop.exit_code


def toy_in_a_fork(folder):
    """This process already has torch, so a fork of it starts at once."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = toy_for_ever(folder)
        finally:
            os._exit(code)
    return child


def test_f5_twenty_sigterms_at_random_moments(tmp_path):
    draw, saved, seconds = random.Random(0), 0, []
    for number in range(12):
        folder = tmp_path / f"light {number}"
        child = toy_in_a_fork(folder)
        while status(folder).get("state") != "running":
            time.sleep(0.01)
        time.sleep(draw.random())
        began = time.monotonic()
        os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seconds.append(time.monotonic() - began)
        saved += code == 75 and saved_step(folder) == status(folder)["step"]
    for number in range(8):
        folder = tmp_path / f"real {number}"
        process = begin(folder, *endless(number, folder), f"DATALOADER.WORKERS={number // 4}")
        wait_until_running(process, folder)
        time.sleep(3 * draw.random())
        process.send_signal(signal.SIGTERM)
        seconds.append(seconds_to_end(process))
        saved += process.returncode == 75 and saved_step(folder) == status(folder)["step"]
        end_all(process)
    record("F5", "of 20 SIGTERMs, checkpoints of that step", saved, 20)
    record("F5", "the exit code in status.json", status(folder)["code"], 75)
    p95 = round(statistics.quantiles(seconds, n=20)[-1], 2)
    record("F5", "seconds from the signal to the end, 95th percentile", p95, "< 5", kept=p95 < 5)


def test_f6_a_signal_to_the_whole_group_with_workers(tmp_path):
    seconds, orphans = [], 0
    for number in range(5):
        folder = tmp_path / str(number)
        process = begin(folder, *endless(number, folder), "DATALOADER.WORKERS=2")
        wait_until_running(process, folder)
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGTERM)
        seconds.append(seconds_to_end(process))
        time.sleep(0.2)
        orphans += len(left_over(process.pid))
        end_all(process)
        assert process.returncode == 75, said(folder)
        assert saved_step(folder) == status(folder)["step"]
    slowest = round(max(seconds), 2)
    record("F6", "processes left behind", orphans, 0)
    record("F6", "seconds to the end, slowest of 5", slowest, "< 5", kept=slowest < 5)


def test_f30_a_flag_on_one_of_two_ranks(tmp_path):
    right = 0
    for number in range(5):
        folder = tmp_path / str(number)
        fault = {"what": "signal", "rank": 1, "step": 3 + number}
        process = begin(folder, *endless(number, folder), dist=2, fault=fault)
        seconds_to_end(process)
        end_all(process)
        right += saved_step(folder) == fault["step"] + 1 and status(folder)["code"] == 75
    record("F30", "of 5 runs, those that both ranks leave at the step of the signal", right, 5)
