"""The training loop: one function, read from top to bottom. All that happens at a step is a line.

Nothing in it is random: dropout and drop path draw from torch's generator, which is seeded at every
step from (seed, step, rank), and all else is a function of the step. So a run that resumes, in the
middle of an epoch too, computes the numbers it would have computed.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from vil.engine.distributed import Ranks, share_buffers, unwrap
from vil.engine.meter import Meter
from vil.engine.run import Run
from vil.engine.state import Average, State, save
from vil.engine.step import backward, set_rate
from vil.engine.task import Task
from vil.utils.errors import DivergedError
from vil.utils.progress import Progress


class Loader(Protocol):
    """What `train` asks of a loader: this rank's batches of the steps start .. stop - 1."""

    steps_per_epoch: int

    def batches(self, start_step: int, stop_step: int) -> Iterable[Any]: ...


class Schedule(Protocol):
    """What `train` asks of a schedule: the learning rate, from the step alone."""

    def lr_at(self, step: int) -> float: ...


def train(
    task: Task,
    model: nn.Module,
    loader: Loader,
    optimizer: Optimizer,
    schedule: Schedule,
    scaler: GradScaler,
    state: State,
    *,
    run: Run,
    ranks: Ranks,
    device: torch.device,
    epochs: int,
    set_progress: Callable[[nn.Module, Progress], None],
    accumulate: int = 1,  # equal parts that a step's batch is run in
    clip_grad: float = 0.0,  # the largest norm of all gradients together, 0: any
    ema: Average | None = None,  # evaluated in place of the weights, saved beside them
    drop_on_plateau: float = 0.0,  # divides the rate after each evaluation that is not the best
    log_freq: int = 10,
    eval_every: int = 1,
    save_every: int = 1,
    keep: int = 2,
    max_steps: int | None = None,
    draw: Callable[[Path], Any] | None = None,  # given the run's folder after each evaluation
) -> State:
    """Train from `state`, that of the start or of any checkpoint, to the end.

    `eval_every` and `save_every` are in epochs; the last step always logs, evaluates and saves.
    Raises DivergedError when the loss is not finite.
    """
    plain, per_epoch = unwrap(model), loader.steps_per_epoch
    end = min(epochs * per_epoch, max_steps or epochs * per_epoch)
    run.tick(state.step)
    if state.step >= end:
        run.log.say(f"nothing to do: {state.step} of {end} steps are done")
        return state
    run.begin()
    run.log.begin(state.step, end, steps_per_epoch=per_epoch, batch_size=state.batch_size)
    meter = Meter(ranks)
    model.train()

    for batch in meter.watch(loader.batches(state.step, end)):
        set_progress(plain, Progress(state.seed, state.step, state.epoch, epochs, per_epoch))
        seed_step(state.seed, state.step, ranks.rank)
        lr = schedule.lr_at(state.step) / (drop_on_plateau or 1.0) ** state.drops
        set_rate(optimizer, lr)

        optimizer.zero_grad()
        figures = backward(task, model, task.prepare(batch), scaler, accumulate, device)
        if clip_grad:
            scaler.unscale_(optimizer)
            figures["grad_norm"] = clip_grad_norm_(plain.parameters(), clip_grad)
        scaler.step(optimizer)
        scaler.update()
        if ema:  # a step that the scaler skipped counts too: the weights stood still
            ema.update()
        state = replace(state, step=state.step + 1)
        run.tick(state.step)
        meter.add(figures)
        done, epoch_ends = state.step == end, state.step % per_epoch == 0

        if state.step % log_freq == 0 or epoch_ends or done:
            figures = meter.read()  # the only place where the host waits for the device
            if not math.isfinite(figures["loss"]):
                raise DivergedError(f"the loss is {figures['loss']} at step {state.step}")
            if scaler.is_enabled():  # it falls with each step that float16 could not hold
                figures["scale"] = scaler.get_scale()
            run.log.training(state.step, lr, figures)

        if done or (epoch_ends and state.epoch % eval_every == 0):
            share_buffers(ema.model if ema else plain)
            results = task.evaluate(ema.model if ema else plain)
            run.log.evaluation(state.step, results)
            figure = next(iter(results.values()))[task.best]  # of the first test set
            state = state.judged(figure, drop=drop_on_plateau > 0)
            if draw and ranks.is_main:
                draw(run.folder)

        if done or state.best_step == state.step or (epoch_ends and state.epoch % save_every == 0):
            share_buffers(plain)
            save(run.checkpoints, plain, optimizer, scaler, state, ranks=ranks, keep=keep, ema=ema)
            run.status("running")
    return state


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, on the CPU and on every accelerator, for one step of one rank."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))
