"""Inject a fault into a real run, by --import. $FAULT is the fault as JSON: `what`, `rank` (0), and

kill, signal, sleep   step: the process gets SIGKILL or SIGTERM, or hangs
inf                   step, a list: gradients are infinite on one rank, before the all-reduce
scale                 scale: a float16 loss scale so large that gradients overflow
pause                 steps, file: wait for a file before these steps
worker                how, training, file: a loader worker ends, after writing its pid to a file
rename, fsync         times or seconds: in a folder of checkpoints, so many calls fail, or each
                      takes so long
A list has one fault for each start by the elastic launcher. Later starts have no fault.
"""

import errno
import functools
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from vil.data.robust_dataset import RobustDataset
from vil.engine import loop
from vil.optim import build as optim

GIVEN = json.loads(os.environ.get("FAULT", "null"))  # none when the run resumes
FAULTS = GIVEN if isinstance(GIVEN, list) else [GIVEN]
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
FAULT = FAULTS[START] if len(FAULTS) > START else None


def at_steps(act):
    """Call `act(step)` before each step."""
    plain = loop.seed_step

    def seed_step(seed, step, rank):
        plain(seed, step, rank)
        act(step)

    loop.seed_step = seed_step


def lie_down():
    while True:
        time.sleep(60)


def strike(step, act):
    at_steps(lambda current: act() if current == step else None)


class Overflow(torch.autograd.Function):
    """Identity in forward, infinite gradients in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


def inf(step):
    plain = loop.backward

    def backward_to_inf(task, model, batch, *rest):
        if batch.step not in step:
            return plain(task, model, batch, *rest)
        hook = model.register_forward_hook(lambda module, given, logits: Overflow.apply(logits))
        try:
            return plain(task, model, batch, *rest)
        finally:
            hook.remove()

    loop.backward = backward_to_inf


def scale(scale):
    optim.GradScaler = functools.partial(optim.GradScaler, init_scale=scale)


def pause(file, steps):
    def wait(step):
        if step in steps:
            Path(f"{file}.{step}.reached").touch()
            while not Path(f"{file}.{step}").exists():
                time.sleep(0.02)

    at_steps(wait)


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


def disk(name, times=0, seconds=0.0):
    plain, left = getattr(os, name), [times]

    def troubled(first, *rest):
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if "checkpoints" in path:
            time.sleep(seconds)
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(first, *rest)

    setattr(os, name, troubled)


KINDS = {
    "kill": functools.partial(strike, act=lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "signal": functools.partial(strike, act=lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "sleep": functools.partial(strike, act=lie_down),
    "inf": inf,
    "scale": scale,
    "pause": pause,
    "worker": worker,
    "rename": functools.partial(disk, "rename"),
    "fsync": functools.partial(disk, "fsync"),
}
if FAULT and int(os.environ.get("RANK", 0)) == FAULT.pop("rank", 0):
    KINDS[FAULT.pop("what")](**FAULT)
