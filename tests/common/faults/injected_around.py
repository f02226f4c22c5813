"""Inject faults around the training step of a real run, by --import. $FAULT is the fault as JSON.

worker    a loader worker exits: how, and whether in training; it writes its pid to a file
pause     wait for a file before some steps
"""

import json
import os
import signal
import time
from pathlib import Path

from torch.utils.data import get_worker_info

from vil.data.robust_dataset import RobustDataset
from vil.engine import loop

FAULT = json.loads(os.environ.get("FAULT", "null"))  # none when the run resumes


def worker(how, training, file):
    plain = RobustDataset.__getitem__

    def dying(samples, at):
        mine, trains = get_worker_info(), samples.tries > 1
        if mine and mine.id == mine.num_workers - 1 and trains == training:
            Path(file).write_text(str(os.getpid()))
            if how == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.Signals[how])
        return plain(samples, at)

    RobustDataset.__getitem__ = dying


def at_steps(act):
    """Call `act(step)` before each step."""
    plain = loop.seed_step

    def seed_step(seed, step, rank):
        act(step)
        plain(seed, step, rank)

    loop.seed_step = seed_step


def wait_for(file):
    Path(f"{file}.reached").touch()
    while not Path(file).exists():
        time.sleep(0.02)


def pause(file, steps):
    at_steps(lambda step: wait_for(f"{file}.{step}") if step in steps else None)


KINDS = {"worker": worker, "pause": pause}
if FAULT:
    KINDS[FAULT.pop("what")](**FAULT)
