"""Inject faults around the training step of a real run, by --import. $FAULT is the fault as JSON.

worker    a loader worker exits: how, and whether in training; it writes its pid and the time to a
          file
line      SIGKILL while a step's line of metrics.jsonl is written
clock     the system clock jumps back by an hour at a step, and forward by two at the next
pause     wait for a file before some steps, or before the folder is opened
start     the start method of workers; torchvision data as the tests write it
card      a GPU without bfloat16
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
from vil.engine import build as device
from vil.engine import logger, loop
from vil.utils import machine
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
    """A stream that writes the first part of a line, then kills the process."""

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
    """Call `act(step)` before each step."""
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
    machine.datetime = Jumping
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
    device._start_device = lambda place: None


KINDS = {
    "worker": worker, "line": line, "clock": clock, "pause": pause, "start": start, "card": card
}  # fmt: skip
if FAULT:
    KINDS[FAULT.pop("what")](**FAULT)
