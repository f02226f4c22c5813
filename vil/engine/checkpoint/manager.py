"""Save checkpoints on a schedule, and tolerate a disk that fails temporarily.

If a checkpoint cannot be written, training continues, and the next scheduled checkpoint is tried.
The run stops after `max_failed_saves` consecutive failures, or if the final save fails.
"""

from dataclasses import dataclass, replace
from functools import partial

from vil.engine.checkpoint.save_load import TrainObjects, TrainState, name_of, newest_step, save
from vil.engine.distributed import broadcast_object, share_buffers
from vil.engine.run_dir import RunDir
from vil.utils.errors import RunFolderError, SaveError


@dataclass(frozen=True)
class CheckpointPolicy:
    """The schedule of evaluations and checkpoints, and the rules for which checkpoints to keep.

    eval_every, save_every: epochs between evaluations, and between checkpoints.
    save_steps: steps between additional checkpoints; 0 for none.
    keep: number of newest checkpoints to keep.
    keep_every: epochs between checkpoints that are never removed; 0 for none.
    max_failed_saves: number of consecutive failed saves after which the run stops.
    """

    eval_every: int = 1
    save_every: int = 1
    save_steps: int = 0
    keep: int = 2
    keep_every: int = 0
    max_failed_saves: int = 3

    def evaluates(self, state: TrainState, end: int) -> bool:
        """Return whether an evaluation is due at the step of `state`. Returns False if this step
        was already evaluated. end: the last step of the run."""
        due = state.epoch_ends and state.epoch % self.eval_every == 0
        return state.evaluated < state.step and (due or state.step == end)

    def saves(self, state: TrainState, end: int) -> bool:
        """Return whether a checkpoint is due at the step of `state`: on the schedule, after a new
        best evaluation, or at `end`, the last step of the run."""
        epoch = state.epoch_ends and state.epoch % self.save_every == 0
        step = self.save_steps > 0 and state.step % self.save_steps == 0
        return state.step in (end, state.best_step) or (state.step > 0 and (epoch or step))

    def is_pinned(self, state: TrainState, step: int) -> bool:
        """Return whether the checkpoint of `step` is never removed, because the step ends an epoch
        that is a multiple of `keep_every`."""
        epoch, rest = divmod(step, state.steps_per_epoch)
        return self.keep_every > 0 and rest == 0 and epoch % self.keep_every == 0


class CheckpointManager:
    """A writer of a run's checkpoints. It tolerates temporary failures, and skips a state that is
    already saved.

    state: the state from which the run starts.
    """

    def __init__(
        self, run: RunDir, objects: TrainObjects, policy: CheckpointPolicy, state: TrainState
    ):
        self.run, self.objects, self.policy, self.failed = run, objects, policy, 0
        newest = broadcast_object(newest_step(run.checkpoints) if run.dist.is_main else None)
        self.saved = state if newest == state.step else None

    def check_best(self, state: TrainState) -> TrainState:
        """Check that the best checkpoint still exists, and return `state`.

        If the checkpoint was deleted, the returned state has no best metric value and no best step.
        The next evaluation is then the best one, and its checkpoint is saved.
        """
        step = state.best_step
        if step is None or step == state.step:
            return state
        folder = self.run.checkpoints / name_of(step)
        if not broadcast_object(not folder.is_dir()):
            return state
        self.run.log.say(
            f"ERROR the best checkpoint, {folder}, was deleted: the best metric value is reset"
        )
        return replace(state, best=None, best_step=None)

    def save(self, state: TrainState, *, required: bool = False) -> TrainState:
        """Save a checkpoint of `state`, unless the same state was saved already.

        If the save fails, the error is logged. SaveError is raised instead if the save is
        `required`, or after too many consecutive failures.

        Returns `state`, with one exception: if the save of a new best checkpoint fails, the
        returned state still has the previous best value and best step.
        """
        if self.saved == state:  # not after an evaluation, whose result is part of the state
            return state
        run, policy = self.run, self.policy
        if moved := broadcast_object(run.find_move()):
            run.last_error = moved  # status.json, which is gone too, need not report it again
            raise RunFolderError(moved)
        share_buffers(self.objects.model)
        try:
            save(
                run.checkpoints,
                self.objects,
                state,
                dist=run.dist,
                keep=policy.keep,
                is_pinned=partial(policy.is_pinned, state),
                say=run.log.say_once,
            )
        except SaveError as error:
            self.failed += 1
            if required or self.failed >= policy.max_failed_saves:
                raise
            run.log.say(f"ERROR {error}; training continues ({self.failed} failed in a row)")
            run.log.record(state.step, "save", {"failed": self.failed})
            return self._restore_best(state)
        self.failed, self.saved = 0, state
        run.status("running")
        return state

    def _restore_best(self, state: TrainState) -> TrainState:
        """Undo a new best metric value of `state` after its checkpoint could not be written.

        The returned state has the best value and best step of the last saved state. If `state` has
        no new best value, it is returned unchanged.
        """
        if state.best_step != state.step:
            return state
        best, step = (self.saved.best, self.saved.best_step) if self.saved else (None, None)
        kept = "no checkpoint is" if step is None else f"{name_of(step)} remains"
        self.run.log.say(f"ERROR the new best checkpoint could not be written: {kept} the best")
        return replace(state, best=best, best_step=step)
