"""A fault for a real run, given to it by --import. $FAULT says which, as JSON: what, step, rank.

kill      the process dies            sleep   it stands still          nan    the loss is no number
signal    SIGTERM to itself
Where the elastic launcher has started the run again, nothing happens.
"""

import json
import os
import signal
import time

import torch

from vil.engine import train

FAULT = json.loads(os.environ["FAULT"])
MINE = int(os.environ.get("RANK", 0)) == FAULT.get("rank", 0)
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def lie_down():
    while True:
        time.sleep(60)


def strike():
    {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "sleep": lie_down,
    }[FAULT["what"]]()


def seed_step(seed, step, rank, plain=train.seed_step):
    plain(seed, step, rank)
    if step == FAULT["step"] and FAULT["what"] != "nan":
        strike()


def backward(task, model, batch, *rest, plain=train.backward):
    figures = plain(task, model, batch, *rest)
    if batch.step == FAULT["step"] and FAULT["what"] == "nan":
        for parameter in model.parameters():
            parameter.grad.fill_(torch.nan)
        figures["loss"] = figures["loss"] * torch.nan
    return figures


if MINE and FIRST:
    train.seed_step, train.backward = seed_step, backward
