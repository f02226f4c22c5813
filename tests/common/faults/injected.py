"""Inject a fault into a real run, by --import. $FAULT is the fault as JSON: what, step, rank.

kill      SIGKILL to the process      sleep   the process hangs
signal    SIGTERM to the process
inf       gradients are infinite on one rank, before the all-reduce; `step` is a list
scale     a float16 loss scale so large, `scale`, that gradients overflow
A list has one fault for each start by the elastic launcher. Later starts have no fault.
"""

import functools
import json
import os
import signal
import time

import torch

from vil.engine import loop
from vil.optim import build as optim

GIVEN = json.loads(os.environ.get("FAULT", "null"))  # none when the run resumes
FAULTS = GIVEN if isinstance(GIVEN, list) else [GIVEN]
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
FAULT = FAULTS[START] if len(FAULTS) > START else None
MINE = FAULT and int(os.environ.get("RANK", 0)) == FAULT.get("rank", 0)


def lie_down():
    while True:
        time.sleep(60)


def strike():
    {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "sleep": lie_down,
    }[FAULT["what"]]()


def seed_step(seed, step, rank, plain=loop.seed_step):
    plain(seed, step, rank)
    if step == FAULT["step"]:
        strike()


class Overflow(torch.autograd.Function):
    """Identity in forward, infinite gradients in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


def backward_to_inf(task, model, batch, *rest, plain=loop.backward):
    if batch.step not in FAULT["step"]:
        return plain(task, model, batch, *rest)
    hook = model.register_forward_hook(lambda module, given, logits: Overflow.apply(logits))
    try:
        return plain(task, model, batch, *rest)
    finally:
        hook.remove()


if MINE and FAULT["what"] == "inf":
    loop.backward = backward_to_inf
elif MINE and FAULT["what"] == "scale":
    optim.GradScaler = functools.partial(optim.GradScaler, init_scale=FAULT["scale"])
elif MINE:
    loop.seed_step = seed_step
