"""The training loop, as a single function, `train`.

torch's random generators are seeded at every step from (seed, step, rank). So a resumed run is
bit-identical to an uninterrupted one, even if it resumes in the middle of an epoch.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vil.engine.checkpoint.manager import CheckpointManager, CheckpointPolicy
from vil.engine.checkpoint.save_load import TrainObjects, TrainState
from vil.engine.copy_stream import CopyStream
from vil.engine.distributed import all_reduce_sum, share_buffers, wrap
from vil.engine.evaluation import autocast
from vil.engine.fsdp import is_sharded, local
from vil.engine.logger import RunLogger
from vil.engine.meter import Meter, is_line_due
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
from vil.utils.errors import StoppedError
from vil.utils.train_step import TrainStep

DRAW_SECONDS = 30  # least time between two drawings of the curves


class Metric(NamedTuple):
    """The metric that selects the best checkpoint, by its value on the first test set."""

    name: str
    higher_is_better: bool = True
    label: str = ""  # for plots and pages
    unit: str = ""


class Loss(NamedTuple):
    """The loss of a batch, or of a micro-batch if gradients are accumulated.

    If `normalizer` is None, `value` is a mean over samples of equal weight. Otherwise, `value` is a
    sum over samples, and `normalizer` is its divisor, such as the sum of the sample weights. The
    loss of a training step is then sum(value) / sum(normalizer) over all micro-batches and ranks.
    """

    value: Tensor
    normalizer: Tensor | None = None
    metrics: dict[str, Tensor] = {}  # detached scalars to log


class Evaluation(NamedTuple):
    """An evaluation during training, as `vil.train` passes it to `on_evaluation`.

    metrics: {test set: {metric: value}}, without those that are no numbers, such as per-class
    tables.
    is_best: whether this evaluation is the best one so far.
    """

    step: int
    epoch: float
    metrics: dict[str, dict[str, float]]
    run_dir: Path
    is_best: bool


class Task(Protocol):
    """Protocol of a task such as detection, with the methods of `vil.tasks.base.Task` that the loop
    calls."""

    metric: Metric
    amp_dtype: torch.dtype | None  # autocast's precision, None: full

    def prepare(self, batch: Any) -> Any: ...
    def split(self, batch: Any, num_parts: int) -> Iterable[Any]: ...
    def loss(self, model: nn.Module, batch: Any) -> Loss: ...

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = ...
    ) -> dict[str, dict[str, Any]]:
        """Return {test set: metrics}, the same on every rank.

        `between` is called before each batch, equally often on every rank. An exception that it
        raises ends the evaluation.
        """


class Loader(Protocol):
    """A loader whose `batches` returns this rank's batches for the steps from start_step to
    stop_step - 1, one per step."""

    steps_per_epoch: int

    def batches(self, start_step: int, stop_step: int) -> Iterable[Any]: ...


def train(
    task: Task,
    loader: Loader,
    objects: TrainObjects,
    lr_at: Callable[[int], float],
    state: TrainState,
    *,
    run: RunDir,
    guard: PreemptionGuard,
    epochs: int,
    policy: CheckpointPolicy,
    set_progress: Callable[[nn.Module, TrainStep], None],
    accumulate: int = 1,
    clip_grad: float = 0.0,
    drop_on_plateau: float = 0.0,
    patience: int = 0,
    min_delta: float = 0.0,
    max_bad_steps: int = 10,
    log_freq: int = 10,
    max_steps: int | None = None,
    draw: Callable[[Path], Any] | None = None,
    on_evaluation: Callable[[Evaluation], Any] | None = None,
) -> TrainState:
    """Train until the last epoch, or until `patience` consecutive evaluations did not improve the
    metric. Returns the final state.

    lr_at: function that returns the learning rate of a step.
    state: the initial state, or that of a loaded checkpoint.
    policy: schedule of evaluations and checkpoints.
    set_progress: called before each step to pass the step to the model's schedules.
    accumulate: number of equal micro-batches per step.
    clip_grad: upper bound of the norm of all gradients together; 0 for no clipping.
    drop_on_plateau: number by which the learning rate is divided after each evaluation without a
    new best metric value; 0 for no drops.
    patience: 0 for no early stopping.
    min_delta: for `patience`, an improvement of the metric must be larger than this.
    max_bad_steps: number of consecutive steps that may be skipped because the loss or a gradient is
    not finite. Without float16, larger values than half an epoch are reduced to half an epoch.
    log_freq: steps between two lines of the log.
    max_steps: step at which the run ends, if that is before its last epoch.
    draw: called on rank 0 with the run's folder after the last evaluation, and after earlier ones
    at most every DRAW_SECONDS.
    on_evaluation: called on rank 0 after each evaluation and the checkpoint that follows it.

    Raises DivergedError if more than `max_bad_steps` consecutive steps are skipped, and
    StoppedError, after saving a checkpoint, if a signal was received.
    """
    dist, device, per_epoch = run.dist, run.device, loader.steps_per_epoch
    plain, optimizer, scaler, ema = objects
    model, evaluated_model = wrap(plain, dist, device), ema.model if ema else plain
    end = min(epochs * per_epoch, max_steps or epochs * per_epoch)
    run.tick(state.step)
    if has_ended(run, state, end, patience, min_delta):
        return state
    run.begin()
    run.log.begin(
        state.step,
        end,
        evaluates=policy.evaluates(state, end),
        steps_per_epoch=per_epoch,
        batch_size=state.batch_size,
    )
    judgment = dict(higher_is_better=task.metric.higher_is_better, min_delta=min_delta)
    judgment["drop"] = drop_on_plateau > 0
    meter, delayed_flags, norms = Meter(), DelayedFlags(device), BatchNormSnapshot(plain)
    if not scaler.is_enabled():  # float16 skips steps until the gradient scale is low enough
        max_bad_steps = min(max_bad_steps, max(per_epoch // 2, 1))
    bad_steps = NonFiniteSteps(max_bad_steps, run.folder, dist.rank)
    checkpoints, copies = CheckpointManager(run, objects, policy, state), CopyStream(device)
    batches = meter.watch(loader.batches(state.step, end), guard.waiting)
    model.train()
    draw_at = time.monotonic() + DRAW_SECONDS
    guard.watch(run.folder, run.status)

    try:
        guard.check_all_ranks()
        while True:
            results: dict[str, dict[str, Any]] = {}
            if policy.evaluates(state, end):
                share_buffers(evaluated_model)
                results = task.evaluate(evaluated_model, guard.check_all_ranks)
                run.log.evaluation(state.step, results, task.metric.name)
                value = metric_value(results, task.metric, run.log)
                state = checkpoints.check_best(state).after_eval(value, **judgment)
            early = stopped_early(state, patience, min_delta) if state.step < end else ""
            ends = state.step == end or early != ""
            if policy.saves(state, end) or ends:
                with guard.saving():
                    state = checkpoints.save(state, required=ends)
            if draw and results and dist.is_main and (ends or time.monotonic() >= draw_at):
                draw(run.folder)
                draw_at = time.monotonic() + DRAW_SECONDS
            if on_evaluation and results and dist.is_main:
                on_evaluation(summarize(results, state, run.folder))
            if ends:
                run.end(early)
                return state

            batch = next(batches)
            guard.beat()
            set_progress(plain, TrainStep(state.seed, state.step, state.epoch, epochs, per_epoch))
            seed_step(state.seed, state.step, dist.rank)
            lr = lr_at(state.step) * (drop_on_plateau or 1.0) ** -state.drops  # underflows to 0
            set_lr(optimizer, lr)

            norms.keep()
            optimizer.zero_grad()
            prepared = copies.prepare(task.prepare, batch)
            metrics = backward(task, model, prepared, scaler, accumulate, device)
            scaler.unscale_(optimizer)
            metrics["grad_norm"] = gradient_norm(plain, clip_grad)
            flags = all_reduce_flags(metrics["loss"], metrics["grad_norm"], guard.received_signal)
            norms.restore(flags[0])
            update(optimizer, flags[0])
            scaler.update()
            if ema:
                ema.update(flags[0])
            meter.add(metrics, flags[0])
            record = dict(step=state.step + 1, lr=lr, scale=scaler.get_scale, samples=batch.indices)
            previous = delayed_flags.read(flags, record)
            bad = bad_steps.count(previous, plain, state.step + 1)
            state = replace(state, step=state.step + 1, skipped=state.skipped + bad)
            run.tick(state.step)
            run.log.watch_speed(meter.computed())

            if is_line_due(state.step, end=end, per_epoch=per_epoch, log_freq=log_freq):
                run.log.training(state.step, lr, read_metrics(meter, scaler, state))
            else:
                run.log.first_progress(state.step)  # if the first line takes long
            guard.raise_if_stopped(previous.signal)
    except StoppedError as stop:
        with guard.saving():
            checkpoints.save(state, required=True)
        stop.train_state = state
        run.log.say(f"{stop}; step {state.step} is saved, --resume continues from there")
        raise
    finally:
        batches.close()


def has_ended(run: RunDir, state: TrainState, end: int, patience: int, min_delta: float) -> bool:
    """Return whether a run that starts from `state` has no step or evaluation left. If so, log the
    reason and mark the run as ended. end: the last step. patience, min_delta: see `train`."""
    early = ""
    if state.step > end or state.step == state.evaluated == end:
        reason = f"{state.step} of {end} steps are done"
    elif early := stopped_early(state, patience, min_delta):
        reason = f"{early}; raise RUN.PATIENCE or set it to 0 to continue"
    else:
        return False
    run.log.say(f"nothing to do: {reason}")
    run.end(early)
    return True


def read_metrics(meter: Meter, scaler: GradScaler, state: TrainState) -> dict[str, float]:
    """Return the metrics to log: the averages of `meter`, the scale of the gradient scaler, and the
    number of skipped steps. The loop waits for the device only here."""
    metrics = meter.read()
    if scaler.is_enabled():  # each float16 overflow lowers the scale
        metrics["scale"] = scaler.get_scale()
    if state.skipped:
        metrics["skipped"] = state.skipped
    return metrics


def metric_value(results: dict[str, dict[str, Any]], metric: Metric, log: RunLogger) -> float:
    """Return the value of the metric on the first test set. If the value is missing or NaN, return
    NaN and log, once per run, that the checkpoint of this step cannot be the best."""
    name, metrics = next(iter(results.items()))
    value = metrics.get(metric.name, math.nan)
    if math.isnan(value):
        what = "is NaN" if metric.name in metrics else f"is not among {', '.join(metrics)}"
        log.say_once(f"WARNING {metric.name} of {name} {what}: this checkpoint cannot be the best")
    return value


def summarize(results: dict[str, dict[str, Any]], state: TrainState, folder: Path) -> Evaluation:
    """Return the results of the evaluation at the step of `state`. folder: the run's folder."""
    numbers = {
        name: {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
        for name, metrics in results.items()
    }
    epoch, is_best = state.step / state.steps_per_epoch, state.best_step == state.step
    return Evaluation(state.step, epoch, numbers, folder, is_best)


def stopped_early(state: TrainState, patience: int, min_delta: float) -> str:
    """Return the reason for ending the run before its last epoch, or "" if the run continues.

    The run ends if `patience` consecutive evaluations did not improve the metric by more than
    `min_delta`. With a patience of 0, it never ends early.
    """
    if not patience or state.stale < patience:
        return ""
    margin = f" by more than {min_delta:g}" if min_delta else ""
    best = f"{state.best:.6g} of step {state.best_step}" if state.best is not None else "none"
    return (
        f"stopped early after step {state.step}: {state.stale} evaluations in a row did not "
        f"improve the metric{margin} (RUN.PATIENCE {patience}), the best is {best}"
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, on the CPU and all accelerators, from (seed, step, rank)."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr`, times the group's `lr_scale` if it has
    one (layer-wise decay)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def backward(
    task: Task,
    model: nn.Module,
    batch: Any,
    scaler: GradScaler,
    num_parts: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Accumulate the scaled gradients of a batch. Returns {"loss": loss, metric: value}.

    batch: the result of `task.prepare`. It is split into `num_parts` equal micro-batches. The
    accumulated gradients equal those of the unsplit batch, except for batch norms and dropout.
    """
    means: dict[str, Tensor] = {}
    normalizers: list[Tensor] = []
    for number, part in enumerate(task.split(batch, num_parts), start=1):
        with sync_gradients(model, number == num_parts):
            with autocast(device, task.amp_dtype):
                value, normalizer, metrics = task.loss(model, part)
            scaler.scale(value / num_parts).backward()
        if normalizer is not None:
            normalizers.append(normalizer.detach())
        for name, metric in {"loss": value, **metrics}.items():
            means[name] = means.get(name, 0) + metric.detach() / num_parts
    if normalizers:
        means["loss"] = means["loss"] * rescale_gradients(
            model, sum(normalizers[1:], normalizers[0]), num_parts
        )
    return means


def rescale_gradients(model: nn.Module, normalizer: Tensor, num_parts: int) -> Tensor:
    """Turn averaged gradients of `Loss.value` into those of sum(value) / sum(normalizer).

    The given gradients are averages over all micro-batches and ranks. They are multiplied by the
    number of micro-batches of all ranks, and divided by the sum of `Loss.normalizer` over them.
    Returns this factor. The caller multiplies its averaged loss by the same factor.

    normalizer: sum of `Loss.normalizer` over this rank's micro-batches. num_parts: number of
    micro-batches of a rank.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    normalizer = all_reduce_sum(normalizer.clone())
    factor = torch.where(normalizer > 0, num_parts * world / normalizer, 0)  # no samples: 0
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        local(gradient).mul_(factor)
    return factor


def sync_gradients(model: nn.Module, sync: bool) -> AbstractContextManager:
    """Return a context in which DDP and FSDP reduce gradients over the ranks only if `sync`.

    The loop passes True only for the last micro-batch, so that gradients are reduced once per step.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(sync)
    return (
        nullcontext() if sync or not isinstance(model, DistributedDataParallel) else model.no_sync()
    )
