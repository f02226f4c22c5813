"""When a run evaluates and saves, and what becomes of a checkpoint that cannot be written.

A full or failing disk does not end a run: it goes on with the checkpoints it has, says so, and
tries again when the next one is due. Too many failures in a row do, and so does the last one.
"""

from dataclasses import dataclass

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.engine.checkpoint.save_load import Average, TrainState, newest_step, save
from vil.engine.distributed import DistInfo, broadcast_object, share_buffers
from vil.engine.run_dir import RunDir
from vil.utils.errors import SaveError


@dataclass(frozen=True)
class CheckpointPolicy:
    """Epochs between evaluations and between checkpoints, steps between further ones (0: none), and
    which checkpoints stay: the `keep` newest, and those of each `keep_every`-th epoch (0: none)."""

    eval_every: int = 1
    save_every: int = 1
    save_steps: int = 0
    keep: int = 2
    keep_every: int = 0
    max_failed_saves: int = 3

    def evaluates(self, state: TrainState, end: int) -> bool:
        """Whether the weights of this step are to be evaluated, and were not."""
        due = state.epoch_ends and state.epoch % self.eval_every == 0
        return state.evaluated < state.step and (due or state.step == end)

    def saves(self, state: TrainState, end: int) -> bool:
        """Whether this step's checkpoint is due."""
        epoch = state.epoch_ends and state.epoch % self.save_every == 0
        step = self.save_steps > 0 and state.step % self.save_steps == 0
        return state.step in (end, state.best_step) or (state.step > 0 and (epoch or step))

    def is_pinned(self, state: TrainState, step: int) -> bool:
        """Whether a checkpoint is never removed."""
        epoch, rest = divmod(step, state.steps_per_epoch)
        return self.keep_every > 0 and rest == 0 and epoch % self.keep_every == 0


class CheckpointManager:
    """Saves a run's state, once per step."""

    def __init__(
        self,
        run: RunDir,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler,
        ema: Average | None,
        dist: DistInfo,
        policy: CheckpointPolicy,
    ):
        self.run, self.dist, self.policy, self.model = run, dist, policy, model
        self.objects = dict(optimizer=optimizer, scaler=scaler, ema=ema)
        self.saved = broadcast_object(newest_step(run.checkpoints) if dist.is_main else None)
        self.failed = 0

    def save(self, state: TrainState, *, required: bool = False) -> None:
        """The checkpoint of a step, unless there is one. SaveError if it fails and `required`, or
        has failed too often."""
        if self.saved == state.step:
            return
        share_buffers(self.model)
        try:
            save(
                self.run.checkpoints,
                self.model,
                state=state,
                dist=self.dist,
                keep=self.policy.keep,
                is_pinned=lambda step: self.policy.is_pinned(state, step),
                **self.objects,
            )
        except SaveError as error:
            self.failed += 1
            if required or self.failed >= self.policy.max_failed_saves:
                raise
            self.run.log.say(f"ERROR {error}; training goes on ({self.failed} in a row)")
            self.run.log.failure(state.step, self.failed)
            return
        self.failed, self.saved = 0, state.step
        self.run.status("running")
