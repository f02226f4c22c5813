"""Faults around the training step, given to a real run by --import. $FAULT says which, as JSON.

worker    a worker of the loader ends by itself: how, while training or not; it leaves its pid and
          the time in a file
line      SIGKILL in the middle of a step's line of metrics.jsonl
clock     the wall clock falls back by an hour at a step, and is two hours later at the next
pause     before some steps, or before the folder is opened, it waits for a file
start     how worker processes start, and torchvision's data as the tests write them
card      a graphics card without bfloat16
"""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from vil.data.robust_dataset import RobustDataset
from vil.engine import logger, loop, run_dir
from vil.workflows import train as training

FAULT = json.loads(os.environ.get("FAULT", "null"))  # none when the run resumes


def worker(how, training, file):
    plain = RobustDataset.__getitem__

    def dying(samples, at):
        mine, trains = get_worker_info(), samples.tries > 1
        if mine and mine.id == mine.num_workers - 1 and trains == training:
            Path(file).write_text(f"{os.getpid()} {time.monotonic()}")
            if how == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.Signals[how])
        return plain(samples, at)

    RobustDataset.__getitem__ = dying


class HalfAFile:
    """Takes the first half of what is written, and then nothing ever again."""

    def __init__(self, stream, share):
        self.stream, self.share = stream, share

    def write(self, text):
        self.stream.write(text[: max(1, int(self.share * len(text)))])
        self.stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def line(step, share):
    plain = logger.RunLogger.record

    def record(self, now, split, figures):
        if now == step:
            self.metrics = HalfAFile(self.metrics, share)
        plain(self, now, split, figures)

    logger.RunLogger.record = record


def at_steps(act):
    """`act(step)` before each step."""
    plain = loop.seed_step

    def seed_step(seed, step, rank):
        act(step)
        plain(seed, step, rank)

    loop.seed_step = seed_step


def clock(step):
    plain, jump = time.time, [0]

    class Jumping(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=jump[0])

    def act(now):
        if now in (step, step + 1):
            jump[0] = -3600 if now == step else 3600
            time.sleep(0.5)  # for all who look at the clock now and then

    time.time = lambda: plain() + jump[0]
    logger.datetime = run_dir.datetime = Jumping
    at_steps(act)


def wait_for(file):
    Path(f"{file}.reached").touch()
    while not Path(file).exists():
        time.sleep(0.02)


def pause(file, steps=(), building=False):
    if building:
        plain = training.task_for

        def task_for(*args):
            wait_for(file)
            return plain(*args)

        training.task_for = task_for
    at_steps(lambda step: wait_for(f"{file}.{step}") if step in steps else None)


def start(method):
    import pytest

    from tests.common.data_files import write_cifar

    write_cifar(Path(tempfile.mkdtemp()), pytest.MonkeyPatch())  # whose files have other checksums
    if method:
        multiprocessing.set_start_method(method, force=True)
        multiprocessing.set_forkserver_preload(["vil.data.loader"])


def card():
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: False
    torch.cuda.get_device_name = lambda device=None: "an old card"


KINDS = {
    "worker": worker, "line": line, "clock": clock, "pause": pause, "start": start, "card": card
}  # fmt: skip
if FAULT:
    KINDS[FAULT.pop("what")](**FAULT)
