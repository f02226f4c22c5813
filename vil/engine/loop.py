"""The training loop: one function, read from top to bottom. All that happens at a step is a line.

Nothing in it is random: dropout and drop path draw from torch's generator, which is seeded at every
step from (seed, step, rank), and all else is a function of the step. So a run that resumes, in the
middle of an epoch too, computes the numbers it would have computed.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.engine.checkpoint.manager import CheckpointManager, CheckpointPolicy
from vil.engine.checkpoint.save_load import Average, TrainState
from vil.engine.distributed import DistInfo, share_buffers, unwrap
from vil.engine.meter import Meter
from vil.engine.nonfinite import (
    BatchNormSnapshot,
    DelayedFlags,
    NonFiniteSteps,
    all_reduce_flags,
    gradient_norm,
    update,
)
from vil.engine.preemption import PreemptionGuard
from vil.engine.run_dir import RunDir
from vil.engine.step import backward, set_lr
from vil.engine.task import Task
from vil.utils.errors import StoppedError
from vil.utils.train_step import TrainStep


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
    state: TrainState,
    *,
    run: RunDir,
    guard: PreemptionGuard,
    ranks: DistInfo,
    device: torch.device,
    epochs: int,
    rhythm: CheckpointPolicy,
    set_progress: Callable[[nn.Module, TrainStep], None],
    accumulate: int = 1,  # equal parts that a step's batch is run in
    clip_grad: float = 0.0,  # the largest norm of all gradients together, 0: any
    ema: Average | None = None,  # evaluated in place of the weights, saved beside them
    drop_on_plateau: float = 0.0,  # divides the rate after each evaluation that is not the best
    max_bad_steps: int = 10,  # in a row, not finite; or half an epoch, if that is less
    log_freq: int = 10,
    max_steps: int | None = None,
    draw: Callable[[Path], Any] | None = None,  # given the run's folder after each evaluation
) -> TrainState:
    """Train from `state`, that of the start or of any checkpoint, to the end.

    Raises DivergedError when too many steps in a row were not finite, and StoppedError, with all
    saved, after a signal.
    """
    plain, per_epoch = unwrap(model), loader.steps_per_epoch
    end = min(epochs * per_epoch, max_steps or epochs * per_epoch)
    run.tick(state.step)
    if state.step > end or state.step == state.evaluated == end:
        run.log.say(f"nothing to do: {state.step} of {end} steps are done")
        return state
    run.begin()
    run.log.begin(state.step, end, steps_per_epoch=per_epoch, batch_size=state.batch_size)
    meter, late, statistics = Meter(ranks), DelayedFlags(device), BatchNormSnapshot(plain)
    bad_steps = NonFiniteSteps(min(max_bad_steps, per_epoch // 2), run.folder, ranks.rank)
    keeper = CheckpointManager(run, plain, optimizer, scaler, ema, ranks, rhythm)
    batches = meter.watch(loader.batches(state.step, end), guard.waiting)
    model.train()
    guard.watch(run.folder, run.status)

    try:
        guard.check_all_ranks()
        while True:
            if rhythm.evaluates(state, end):
                share_buffers(ema.model if ema else plain)
                results = task.evaluate(ema.model if ema else plain, guard.check_all_ranks)
                run.log.evaluation(state.step, results)
                figure = next(iter(results.values()))[task.best]  # of the first test set
                state = state.after_eval(figure, drop=drop_on_plateau > 0)
                if draw and ranks.is_main:
                    draw(run.folder)
            if rhythm.saves(state, end):
                keeper.save(state, must=state.step == end)
            if state.step == end:
                return state

            batch = next(batches)
            guard.beat()
            set_progress(plain, TrainStep(state.seed, state.step, state.epoch, epochs, per_epoch))
            seed_step(state.seed, state.step, ranks.rank)
            lr = schedule.lr_at(state.step) / (drop_on_plateau or 1.0) ** state.drops
            set_lr(optimizer, lr)

            statistics.keep()
            optimizer.zero_grad()
            figures = backward(task, model, task.prepare(batch), scaler, accumulate, device)
            scaler.unscale_(optimizer)
            figures["grad_norm"] = gradient_norm(plain, clip_grad)
            flags = all_reduce_flags(figures["loss"], figures["grad_norm"], guard.received_signal)
            statistics.restore(flags[0])
            update(optimizer, flags[0])
            scaler.update()
            if ema:
                ema.update(flags[0])
            meter.add(figures, flags[0])
            told = late.read(flags)
            facts = dict(step=state.step + 1, lr=lr, scale=scaler.get_scale, samples=batch.indices)
            bad = bad_steps.count(told, plain, **facts)
            state = replace(state, step=state.step + 1, skipped=state.skipped + bad)
            run.tick(state.step)

            if state.step % log_freq == 0 or state.epoch_ends or state.step == end:
                figures = meter.read()  # the only place where the host waits for the device
                if scaler.is_enabled():  # it falls with each step that float16 could not hold
                    figures["scale"] = scaler.get_scale()
                if state.skipped:
                    figures["skipped"] = state.skipped
                run.log.training(state.step, lr, figures)
            guard.raise_if_stopped(told.signal)
    except StoppedError as stop:
        keeper.save(state, must=True)
        run.log.say(f"{stop}; step {state.step} is saved, --resume goes on from there")
        raise
    finally:
        batches.close()


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, on the CPU and on every accelerator, for one step of one rank."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))
