"""Checkpoints: what a run needs to go on as if it had never stopped.

    <run>/checkpoints/step-00001234/model.safetensors   weights, under the plain model's names
                                    ema.safetensors     their average, if there is one: same names
                                    state.pt            optimizer, GradScaler, TrainState
                                    manifest.json       size and SHA-256 of each, step, versions
                                    manifest.sha256     that of the manifest
    <run>/checkpoints/last, best                        text files with a folder's name

No random generator is saved: the loop seeds torch's at every step from (seed, step, rank). The
optimizer's state is kept by parameter name (momenta.py). `state.pt` is read with weights_only=True:
it can hold data, never code.
"""

import platform
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.engine.checkpoint.manifest import (
    begin_folder,
    find_corruption,
    need_space,
    publish_folder,
    remove,
)
from vil.engine.checkpoint.model_weights import check_finite, full_state_dict, load_exactly
from vil.engine.checkpoint.optimizer_state import load_by_name, state_by_name
from vil.engine.distributed import DistInfo, broadcast_object
from vil.utils.atomic_write import replace_text, set_default_permissions
from vil.utils.errors import CheckpointError, SaveError, of_torch_load, one_line

WEIGHTS = "model.safetensors"
AVERAGE = "ema.safetensors"
STATE = "state.pt"
TRIES = 2  # of writing a checkpoint: a network disk may fail once


@dataclass(frozen=True)
class TrainState:
    """Where a run stands. Its shape comes first: a step means nothing without it."""

    seed: int
    world: int
    batch_size: int  # images per step, all ranks together
    steps_per_epoch: int
    optimizer: str  # its name
    step: int = 0  # steps done
    best: float | None = None  # the best evaluation figure so far
    best_step: int | None = None  # and the step it was reached at
    drops: int = 0  # evaluations that lowered the learning rate, being no better
    evaluated: int = 0  # the step of the last evaluation
    skipped: int = 0  # steps that moved nothing: their loss or gradient was not finite

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.step // self.steps_per_epoch

    @property
    def epoch_ends(self) -> bool:
        """Whether an epoch has just been done."""
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    def after_eval(
        self, value: float, *, drop: bool = False, higher_is_better: bool = True
    ) -> "TrainState":
        """Return the state after an evaluation: with a new best or, if `drop`, one more drop of the
        learning rate."""
        state = replace(self, evaluated=self.step)
        better = self.best is None or (value > self.best if higher_is_better else value < self.best)
        if better:
            return replace(state, best=value, best_step=self.step)
        return replace(state, drops=self.drops + drop)


class Average(Protocol):
    """What is asked of an average of weights: a model of its own, with the same names."""

    model: nn.Module

    def update(self, bad: Tensor) -> None:
        """Take in the weights after a step, unless `bad` is 1."""

    def restart(self) -> None:
        """Begin again at the weights of now."""


# ------------------------------------------------------------------------------------------- saving


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    state: TrainState,
    *,
    dist: DistInfo,
    keep: int,
    is_pinned: Callable[[int], bool] = lambda step: False,
    ema: Average | None = None,
) -> Path:
    """Write the checkpoint of `state.step` into `folder`; rank 0 writes, the others wait.

    Then keep the `keep` newest ones, the best and those that `stays` names. On every rank,
    DivergedError rather than write a weight that is not a finite number, and SaveError if the disk
    fails twice; the checkpoints that were there are whole then.
    """
    check_finite(model, state.step)
    files = contents(model, optimizer, scaler, state, ema, keep=dist.is_main)
    final, problem = folder / name_of(state.step), None
    for _ in range(TRIES if dist.is_main else 0):
        try:
            write(final, files, state)
            point(folder, state)
            prune(folder, state.step, keep, is_pinned)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises the last one
            problem = one_line(error)
        else:
            problem = None
            break
    if problem := broadcast_object(problem):
        raise SaveError(f"no checkpoint of step {state.step}: {problem}")
    return final


def contents(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    state: TrainState,
    ema: Average | None,
    *,
    keep: bool,
) -> dict[str, dict]:
    """A checkpoint's files. On ranks that do not `keep` them: nothing, but they must take part."""
    files = {
        WEIGHTS: full_state_dict(model, keep=keep),
        AVERAGE: full_state_dict(ema.model, keep=keep) if ema else None,
        STATE: {
            "state": asdict(state),
            "optimizer": state_by_name(optimizer),
            "scaler": scaler.state_dict(),
        },
    }
    return {name: content for name, content in files.items() if content is not None and keep}


def write(final: Path, files: dict[str, dict], state: TrainState) -> None:
    """Write one checkpoint: whole, or nothing of it is left."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    aside = begin_folder(final)
    try:
        need_space(final.parent, sum(map(bytes_of, files.values())))
        for name, content in files.items():
            (save_file if name.endswith(".safetensors") else torch.save)(content, aside / name)
            set_default_permissions(aside / name)
        publish_folder(aside, final, step=state.step, epoch=state.epoch, versions=versions)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def bytes_of(content: Any) -> int:
    """What the tensors in it will take on the disk."""
    if isinstance(content, dict):
        return sum(map(bytes_of, content.values()))
    return content.nbytes if isinstance(content, Tensor) else 0


def point(folder: Path, state: TrainState) -> None:
    """Let `last` and `best` name the checkpoints of `state`. Repeated on resuming: the process may
    have been killed between a checkpoint and its pointers."""
    for name, step in (("last", state.step), ("best", state.best_step)):
        if step is not None and (folder / name_of(step)).is_dir():
            replace_text(folder / name, f"{name_of(step)}\n")


def prune(folder: Path, step: int, keep: int, is_pinned: Callable[[int], bool]) -> None:
    """Remove all but the `keep` newest checkpoints, the best and those that stay.

    Newer ones than `step` stand aside: they were found damaged, and must not push out whole ones.
    """
    best = resolve_link(folder, "best")
    for checkpoint in [c for c in checkpoints(folder) if step_of(c) <= step][max(keep, 1) :]:
        if checkpoint != best and not is_pinned(step_of(checkpoint)):
            remove(checkpoint)


# ------------------------------------------------------------------------------------------ loading


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in `folder`, newest first, damaged ones too."""
    named = [path for path in folder.glob("step-*") if is_name(path.name)]
    return sorted(named, key=step_of, reverse=True)


def resolve_link(folder: Path, name: str) -> Path | None:
    """The checkpoint that the text file `last` or `best` names, None before the first one.

    CheckpointError if it names none: it leads nowhere else.
    """
    file = folder / name
    if not file.exists():
        return None
    named = file.read_text(errors="replace").strip()
    if not is_name(named):
        raise CheckpointError(f"{file} names no checkpoint: delete it, and resume the run")
    return folder / named


def newest_step(folder: Path) -> int:
    """The step that `last` names, -1 before the first checkpoint."""
    last = resolve_link(folder, "last")
    return step_of(last) if last else -1


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def is_name(text: str) -> bool:
    return re.fullmatch("step-[0-9]+", text) is not None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest_valid(folder: Path, warn: Callable[[str], None] = warnings.warn) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there is none at all.

    Steps back past damaged ones with a warning each. If no valid one is left, CheckpointError:
    starting over in silence would throw the run away.
    """
    found = checkpoints(folder)
    for checkpoint in found:
        reason = find_corruption(checkpoint)
        if reason is None:
            return checkpoint
        warn(f"checkpoint {checkpoint} skipped: {reason}")
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {folder} is whole; delete the folder to "
            "start over"
        )
    return None


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    say: Callable[[str], None] = warnings.warn,
) -> TrainState:
    """Put a checkpoint of the same model into the three objects, and return its TrainState."""
    load_exactly(model, checkpoint / WEIGHTS)
    try:
        saved = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
        state = TrainState(**saved["state"])
    except (UnpicklingError, RuntimeError, EOFError, OSError, LookupError, TypeError) as error:
        reason = of_torch_load(error)
        raise CheckpointError(f"{checkpoint / STATE} cannot be read: {reason}") from error
    fresh = load_by_name(optimizer, saved["optimizer"]) if saved["optimizer"] else []
    if fresh:
        say(f"{len(fresh)} parameters start afresh in the optimizer, the first: {fresh[0]}")
    if saved["scaler"]:  # empty unless the run was in float16; GradScaler refuses an empty one
        scaler.load_state_dict(saved["scaler"])
    return state


def resume(
    folder: Path,
    fresh: TrainState,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    *,
    dist: DistInfo,
    say: Callable[[str], None],
    ema: Average | None = None,
) -> TrainState:
    """The state to go on from: that of the newest valid checkpoint, or `fresh` if there is none.

    Rank 0 chooses for all, so the folder must be visible to every machine. Another number of ranks
    or another seed is only mentioned; another epoch length would make the step a lie, and another
    optimizer's momenta mean something else: refused.
    """
    checkpoint = broadcast_object(newest_valid(folder, say) if dist.is_main else None)
    if checkpoint is None:
        return fresh
    saved = load(checkpoint, model, optimizer, scaler, say)
    say(f"resuming from {checkpoint}")
    for name in ("batch_size", "steps_per_epoch", "optimizer"):
        if (old := getattr(saved, name)) != (new := getattr(fresh, name)):
            raise CheckpointError(
                f"{checkpoint} was made with {name} {old}, this run has {new}, which no setting "
                "allows: go back to it, or begin another run with MODEL.MODEL_PATH from this one"
            )
    for name in ("seed", "world"):
        if (old := getattr(saved, name)) != (new := getattr(fresh, name)):
            say(f"{name} was {old} and is {new} from here: not the same numbers bit for bit")
    load_average(checkpoint, ema, say)
    if dist.is_main:
        try:
            point(folder, saved)
        except OSError as error:
            say(f"last and best cannot be rewritten: {one_line(error)}")
    return replace(saved, seed=fresh.seed, world=fresh.world)


def load_average(checkpoint: Path, ema: Average | None, say: Callable[[str], None]) -> None:
    """The average goes on as saved; switched on only now, it starts from the loaded weights."""
    file = checkpoint / AVERAGE
    if ema and file.exists():
        load_exactly(ema.model, file)
    elif ema:
        ema.restart()
        say(f"{checkpoint} has no average of weights: it starts from the weights of now")
    elif file.exists():
        say(f"{checkpoint} has an average of weights, this run keeps none: it ends here")
