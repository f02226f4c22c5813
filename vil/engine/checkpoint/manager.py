"""Save checkpoints on a schedule, and survive a disk that fails for a while.

Training continues if a checkpoint cannot be written, and tries again when the next one is due. The
run stops after N consecutive failures, or if the final save fails.
"""

from dataclasses import dataclass
from functools import partial

from vil.engine.checkpoint.save_load import TrainObjects, TrainState, newest_step, save
from vil.engine.distributed import broadcast_object, share_buffers
from vil.engine.run_dir import RunDir
from vil.utils.errors import SaveError


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a run evaluates and saves, and which checkpoints it keeps."""

    eval_every: int = 1  # epochs
    save_every: int = 1  # epochs
    save_steps: int = 0  # steps between further checkpoints, 0: none
    keep: int = 2  # newest checkpoints
    keep_every: int = 0  # epochs between checkpoints that are never removed, 0: none
    max_failed_saves: int = 3  # in a row

    def evaluates(self, state: TrainState, end: int) -> bool:
        """Whether an evaluation is due that was not yet done."""
        due = state.epoch_ends and state.epoch % self.eval_every == 0
        return state.evaluated < state.step and (due or state.step == end)

    def saves(self, state: TrainState, end: int) -> bool:
        """Whether a checkpoint is due."""
        epoch = state.epoch_ends and state.epoch % self.save_every == 0
        step = self.save_steps > 0 and state.step % self.save_steps == 0
        return state.step in (end, state.best_step) or (state.step > 0 and (epoch or step))

    def is_pinned(self, state: TrainState, step: int) -> bool:
        """Whether the checkpoint of a step is never removed."""
        epoch, rest = divmod(step, state.steps_per_epoch)
        return self.keep_every > 0 and rest == 0 and epoch % self.keep_every == 0


class CheckpointManager:
    """Save a run's state, at most once per step."""

    def __init__(self, run: RunDir, objects: TrainObjects, policy: CheckpointPolicy):
        self.run, self.objects, self.policy, self.failed = run, objects, policy, 0
        newest = newest_step(run.checkpoints) if run.dist.is_main else None
        self.saved_step = broadcast_object(newest)

    def save(self, state: TrainState, *, required: bool = False) -> None:
        """Save a checkpoint. Raises SaveError if a `required` one fails, or too many in a row."""
        if self.saved_step == state.step:
            return
        run, policy = self.run, self.policy
        share_buffers(self.objects.model)
        kept = dict(keep=policy.keep, is_pinned=partial(policy.is_pinned, state))
        try:
            save(run.checkpoints, self.objects, state, dist=run.dist, **kept)
        except SaveError as error:
            self.failed += 1
            if required or self.failed >= policy.max_failed_saves:
                raise
            run.log.say(f"ERROR {error}; training continues ({self.failed} in a row)")
            run.log.record(state.step, "save", {"failed": self.failed})
            return
        self.failed, self.saved_step = 0, state.step
        run.status("running")
