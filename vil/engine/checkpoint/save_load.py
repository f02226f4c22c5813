"""Save and load checkpoints, which contain everything that a run needs to resume bit for bit.

    <run>/checkpoints/step-00001234/model.safetensors   weights, named as in the model without DDP
                                    ema.safetensors     averaged weights, if any, same names
                                    state.pt            optimizer, GradScaler, TrainState
                                    manifest.json       step, versions, each file's size and SHA-256
                                    manifest.sha256     SHA-256 of the manifest
    <run>/checkpoints/last, best                        text files with a folder's name

No state of a random generator is saved: the loop seeds torch's generators at every step from (seed,
step, rank). `state.pt` is read with weights_only=True, so that no code in it can run.
"""

import math
import platform
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vil.engine.checkpoint.manifest import find_corruption, new_folder, remove
from vil.engine.checkpoint.model_weights import check_finite, full_state_dict, load_exactly
from vil.engine.checkpoint.optimizer_state import load_by_name, state_by_name
from vil.engine.distributed import DistInfo, broadcast_object
from vil.utils.atomic_write import replace_text, set_default_permissions
from vil.utils.errors import CheckpointError, SaveError, explain_load_error, one_line
from vil.utils.plural import plural
from vil.utils.torch_file import check_tensors, load_torch_file

WEIGHTS = "model.safetensors"
AVERAGE = "ema.safetensors"
STATE = "state.pt"
is_name = re.compile("step-[0-9]+").fullmatch  # the name of a checkpoint's folder
MAX_REPLACED = 0.1  # share of replaced images with which a run may resume
MAX_ATTEMPTS = 2  # to write a checkpoint: a network disk may fail once


@dataclass(frozen=True)
class TrainState:
    """Settings and progress of a run.

    The settings are seed, world (number of ranks), batch_size, steps_per_epoch and optimizer. When
    a run resumes, they are compared with the saved ones.
    """

    seed: int
    world: int
    batch_size: int  # images per step, all ranks together
    steps_per_epoch: int
    optimizer: str  # its name
    step: int = 0  # steps done
    best: float | None = None  # best value of the task's metric
    best_step: int | None = None  # the step at which it was reached
    drops: int = 0  # evaluations without a new best, each of which lowered the learning rate
    evaluated: int = 0  # the step of the last evaluation
    skipped: int = 0  # steps without an update: their loss or gradient was not finite
    data: str = ""  # fingerprint of the training samples; older checkpoints have none
    images: list = field(default_factory=list)  # `image_digests` of the training samples
    # {config key: value as text} of the keys that must not change; older checkpoints have none
    fixed: dict = field(default_factory=dict)
    imports: dict = field(default_factory=dict)  # {file of a plug-in: its SHA-256}
    metric: str = ""  # name of the metric that `best` is a value of; "": the task's default
    stale: int = 0  # evaluations since one that improved by min_delta; older checkpoints: 0
    improved: float | None = None  # the metric of that evaluation
    test_set: str = ""  # name of the set that `best` was measured on; older checkpoints have none

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self.step // self.steps_per_epoch

    @property
    def epoch_ends(self) -> bool:
        """Whether the last finished step was the last step of its epoch."""
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    def after_eval(
        self,
        value: float,
        *,
        drop: bool = False,
        higher_is_better: bool = True,
        min_delta: float = 0.0,
    ) -> "TrainState":
        """Return the state after an evaluation with the metric `value`. NaN never becomes the best.

        drop: whether a value that is not a new best increases `drops`, which lowers the learning
        rate.
        min_delta: for early stopping, an improvement counts only if it is larger than this.
        """
        sign = 1 if higher_is_better else -1

        def gain(past: float | None) -> float:
            return math.inf if past is None else sign * (value - past)

        state = replace(self, evaluated=self.step, stale=self.stale + 1)
        if math.isnan(value):
            return state if self.best is None else replace(state, drops=self.drops + drop)
        if gain(self.improved) > min_delta:
            state = replace(state, stale=0, improved=value)
        if gain(self.best) > 0:
            return replace(state, best=value, best_step=self.step)
        return replace(state, drops=self.drops + drop)


class Average(Protocol):
    """A moving average of the weights, stored in a copy of the model. See `vil.optim.Ema`."""

    model: nn.Module

    def update(self, bad: Tensor) -> None: ...
    def restart(self) -> None: ...


class TrainObjects(NamedTuple):
    """The objects that training changes and that a checkpoint saves: model, optimizer, gradient
    scaler and, if used, a moving average of the weights."""

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: Average | None = None


# ------------------------------------------------------------------------------------------- saving


def save(
    folder: Path,
    objects: TrainObjects,
    state: TrainState,
    *,
    dist: DistInfo,
    keep: int,
    is_pinned: Callable[[int], bool] = lambda step: False,
    say: Callable[[str], None] = warnings.warn,
) -> Path:
    """Write the checkpoint of `state.step` to `folder`, and return its path. Then remove old
    checkpoints, except the `keep` newest, the best and the pinned ones.

    is_pinned: whether the checkpoint of a given step is pinned. say: called for each checkpoint
    that cannot be removed. All ranks raise DivergedError if a weight is not finite, or SaveError if
    writing fails twice.
    """
    check_finite(objects.model, state.step)
    files = collect_files(objects, state, keep=dist.is_main)
    final, problem = folder / name_of(state.step), None
    for _ in range(MAX_ATTEMPTS if dist.is_main else 0):
        try:
            write(final, files, state)
            update_links(folder, state)
            problem = None
            break
        except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: of torch.save
            problem = one_line(error)
    if problem := broadcast_object(problem):
        raise SaveError(f"the checkpoint of step {state.step} was not written: {problem}")
    if dist.is_main:
        prune(folder, state.step, keep, is_pinned, say)
    return final


def collect_files(objects: TrainObjects, state: TrainState, *, keep: bool) -> dict[str, dict]:
    """Return the content of a checkpoint as {file name: dict to save}. All ranks must call this.
    keep: whether this rank needs the result. If False, an empty dict is returned."""
    model, optimizer, scaler, ema = objects
    files: dict[str, dict] = {WEIGHTS: full_state_dict(model, keep=keep)}
    if ema:
        files[AVERAGE] = full_state_dict(ema.model, keep=keep)
    files[STATE] = {
        "state": asdict(state),
        "optimizer": state_by_name(optimizer),
        "scaler": scaler.state_dict(),
    }
    return files if keep else {}


def write(final: Path, files: dict[str, dict], state: TrainState) -> None:
    """Write a checkpoint to the folder `final`. After an error, no incomplete folder remains.

    If `final` already exists, it is replaced. A complete checkpoint of this step remains on the
    disk during the replacement, even if the process is killed. files: {file name: content}, from
    `collect_files`.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    metadata = {"step": state.step, "epoch": state.epoch, "versions": versions}
    # the old folder during the replacement, under a name that `checkpoints` also lists
    spare = final.with_name(final.name.replace("-", "-0"))
    try:
        with new_folder(final, count_bytes(files), spare=spare, **metadata) as aside:
            for name, content in files.items():
                (save_file if name.endswith(".safetensors") else torch.save)(content, aside / name)
                set_default_permissions(aside / name)
    finally:
        if spare.is_dir() and not final.is_dir():
            spare.rename(final)
    with suppress(OSError):  # `prune` removes it later
        remove(spare)


def count_bytes(content: Any) -> int:
    """Return the total size in bytes of all tensors in nested dicts."""
    if isinstance(content, dict):
        return sum(map(count_bytes, content.values()))
    return content.nbytes if isinstance(content, Tensor) else 0


def update_links(folder: Path, state: TrainState) -> None:
    """Write the names of the last and the best checkpoint to the files `last` and `best` in the
    folder of checkpoints."""
    for name, step in (("last", state.step), ("best", state.best_step)):
        if step is not None and (folder / name_of(step)).is_dir():
            replace_text(folder / name, f"{name_of(step)}\n")


def prune(
    folder: Path,
    step: int,
    keep: int,
    is_pinned: Callable[[int], bool],
    say: Callable[[str], None],
) -> None:
    """Remove old checkpoints, except the `keep` newest, the best and the pinned ones.

    Checkpoints of later steps than `step` are neither counted nor removed. is_pinned: whether the
    checkpoint of a given step is pinned. say: called for each checkpoint that cannot be removed.
    """
    # later checkpoints are corrupt, because the run did not resume from them
    for checkpoint in [c for c in checkpoints(folder) if step_of(c) <= step][max(keep, 1) :]:
        try:
            is_best = checkpoint == resolve_link(folder, "best")
            if not is_best and not is_pinned(step_of(checkpoint)):
                remove(checkpoint)
        except (OSError, CheckpointError) as error:
            say(f"ERROR {checkpoint} cannot be removed: {one_line(error)}")


# ------------------------------------------------------------------------------------------ loading


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, newest first, including corrupt ones."""
    folders = [path for path in folder.glob("step-*") if is_name(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def resolve_link(folder: Path, link: str) -> Path | None:
    """Return the path of the checkpoint that a text file names. Returns None if the text file does
    not exist.

    link: name of the text file, `last` or `best`. Raises CheckpointError if the content of the text
    file is not the name of a checkpoint.
    """
    file = folder / link
    if not file.exists():
        return None
    name = file.read_text(errors="replace").strip()
    if not is_name(name):
        raise CheckpointError(
            f"{file} does not name a checkpoint: delete this file, and resume the run"
        )
    return folder / name


def newest_step(folder: Path) -> int:
    """Return the step of the checkpoint that the file `last` names, or -1 if there is no such
    file."""
    last = resolve_link(folder, "last")
    return step_of(last) if last else -1


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest_valid(folder: Path, warn: Callable[[str], None] = warnings.warn) -> Path | None:
    """Return the path of the newest checkpoint that is not corrupt; None if there are no
    checkpoints.

    `warn` is called for each corrupt checkpoint that is skipped. Raises CheckpointError if all
    checkpoints are corrupt.
    """
    candidates = checkpoints(folder)
    for checkpoint in candidates:
        reason = find_corruption(checkpoint)
        if reason is None:
            return checkpoint
        warn(f"checkpoint {checkpoint} skipped: {reason}")
    if candidates:  # a restart from step 0 would discard the progress of the run
        tried = plural(len(candidates), "checkpoint")
        raise CheckpointError(
            f"none of the {tried} in {folder} is intact; delete the folder to start over"
        )
    return None


def load(
    checkpoint: Path,
    objects: TrainObjects,
    say: Callable[[str], None] = warnings.warn,
    check: Callable[[TrainState], None] = lambda saved: None,
) -> TrainState:
    """Load a checkpoint into the model, optimizer, gradient scaler and average in `objects`.
    Returns the saved TrainState.

    say: function that logs a line. check: called with the saved state before the optimizer's state
    is loaded. Raises CheckpointError if the checkpoint is of another model or cannot be read.
    """
    load_exactly(objects.model, checkpoint / WEIGHTS)
    file = checkpoint / STATE
    state, saved = read_state(file)
    check(state)
    try:
        fresh = load_by_name(objects.optimizer, saved["optimizer"]) if saved["optimizer"] else []
        if saved["scaler"]:  # empty unless the run was in float16; GradScaler refuses an empty one
            objects.scaler.load_state_dict(saved["scaler"])
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{file} does not fit the model's optimizer: {error}; delete this checkpoint to resume "
            "from an earlier one"
        ) from error
    if fresh:
        say(
            f"{len(fresh)} parameters have no saved optimizer state, the first: {fresh[0]}; "
            "their state is initialized"
        )
    load_average(checkpoint, objects.ema, say)
    return state


def read_state(file: Path) -> tuple[TrainState, dict[str, Any]]:
    """Read the file STATE of a checkpoint. Returns its TrainState, and its whole content. Raises
    CheckpointError if it cannot be read."""
    try:
        saved = load_torch_file(file)
        state = TrainState(**saved["state"])
        for name, kind in get_type_hints(TrainState).items():
            value = getattr(state, name)
            if not isinstance(value, kind | int if isinstance(0.0, kind) else kind):
                raise TypeError(f"{name} is {value!r:.40}, expected {kind}")
            if isinstance(value, int) and not 0 <= value < 1 << 63:
                raise ValueError(f"{name} is {value!r:.40}, expected a number from 0 to 2^63 - 1")
        leaves = tree_leaves(saved["optimizer"])
        tensors = (("a tensor", leaf) for leaf in leaves if isinstance(leaf, Tensor))
        check_tensors(tensors, file.stat().st_size)
    except Exception as error:  # arbitrary bytes raise any exception in torch's reader
        raise CheckpointError(f"{file} cannot be read: {explain_load_error(error)}") from error
    return state, saved


def load_average(checkpoint: Path, ema: Average | None, say: Callable[[str], None]) -> None:
    """Load the averaged weights of a checkpoint into `ema`. If the checkpoint has none, restart the
    average from the model's weights. If `ema` is None, averaged weights are ignored. say: function
    that logs a line."""
    file = checkpoint / AVERAGE
    if ema and file.exists():
        load_exactly(ema.model, file)
    elif ema:
        ema.restart()
        say(f"{checkpoint} has no averaged weights: the average starts from the loaded weights")
    elif file.exists():
        say(f"{checkpoint} has averaged weights, which are ignored because OPTIM.EMA is 0")


def resume(
    folder: Path,
    fresh: TrainState,
    objects: TrainObjects,
    *,
    dist: DistInfo,
    say: Callable[[str], None],
    allow_changes: bool = False,
) -> TrainState:
    """Load the newest valid checkpoint and return its state, or `fresh` if there is none.

    All machines need access to `folder`, because rank 0 selects the checkpoint for all ranks.

    The saved settings are compared with those of `fresh`, the state of a new run with the current
    settings. A changed batch size, epoch length or optimizer raises CheckpointError. So do changed
    training samples and fixed config keys, unless `allow_changes` is set. If the metric or test set
    changed, the selection of the best checkpoint starts again. A changed seed or number of ranks is
    only logged.
    say: function that logs a line.
    """
    checkpoint = broadcast_object(newest_valid(folder, say) if dist.is_main else None)
    if checkpoint is None:
        return fresh

    def check_settings(saved: TrainState) -> None:
        for name in ("batch_size", "steps_per_epoch", "optimizer"):
            if (old := getattr(saved, name)) != (new := getattr(fresh, name)):
                raise CheckpointError(
                    f"{checkpoint} was saved with {name} {old}, this run has {new}: restore the "
                    "setting, or start a new run with MODEL.MODEL_PATH set to this checkpoint"
                )

    saved = load(checkpoint, objects, say, check_settings)
    say(f"resuming from {checkpoint}")
    for change in find_changes(saved, fresh, say):
        text = f"{checkpoint} was trained {change}"
        if not allow_changes:
            raise CheckpointError(
                f"{text}: restore it, start a new run with MODEL.MODEL_PATH set to this "
                "checkpoint, or set RUN.ALLOW_CHANGES to True"
            )
        say(text)
    saved = reset_best(saved, fresh, say)
    for name in ("seed", "world"):
        if (old := getattr(saved, name)) != (new := getattr(fresh, name)):
            say(f"{name} was {old} and is {new} now: results will not be bit-identical")
    if dist.is_main:
        try:  # the process may have been killed between a checkpoint and its links
            update_links(folder, saved)
        except OSError as error:
            say(f"{folder}: the files last and best cannot be written: {one_line(error)}")
    for file, digest in fresh.imports.items():
        if saved.imports.get(file, digest) != digest:
            say(f"WARNING {file} has changed since {checkpoint.name} was saved")
    names = ("seed", "world", "data", "images", "fixed", "imports")
    return replace(saved, **{name: getattr(fresh, name) for name in names})


def find_changes(saved: TrainState, fresh: TrainState, say: Callable[[str], None]) -> list[str]:
    """Compare the fixed config keys and the training samples of two states. What an older
    checkpoint does not have is not compared.

    Returns a text for each change that needs RUN.ALLOW_CHANGES. A few replaced images, such as
    repaired ones, are only logged. say: function that logs a line.
    """
    changes = [
        f"with {key} {saved.fixed[key]}, but this run has {value}"
        for key, value in fresh.fixed.items()
        if saved.fixed.get(key, value) != value
    ]
    if not fresh.data.startswith(saved.data):
        return [*changes, f"on {saved.data}, but this run has {fresh.data}"]
    known = [pair for pair in zip(saved.images, fresh.images) if all(pair)]
    replaced = sum(old != new for old, new in known)
    text = f"{replaced} of {len(known)} compared images have other content under the same names"
    if replaced > MAX_REPLACED * len(known):
        changes.append(f"on other images: {text}")
    elif replaced:
        say(f"WARNING the training set has changed: {text}")
    return changes


def reset_best(saved: TrainState, fresh: TrainState, say: Callable[[str], None]) -> TrainState:
    """Return the state `saved`, but with the metric and test set of the state `fresh`.

    If the metric or the test set differs, the best value is removed, and early stopping starts
    again. say: function that logs a line.
    """
    if has_new_metric := saved.metric != fresh.metric:
        old, new = (state.metric or "the default metric" for state in (saved, fresh))
        say(f"the best checkpoint is now selected by {new}, previously by {old}")
    if has_new_set := saved.test_set not in ("", fresh.test_set):
        old, new = saved.test_set, fresh.test_set
        say(f"the best checkpoint is now selected on {new}, previously on {old}")
    if has_new_metric or has_new_set:  # the old values cannot be compared with new ones
        saved = replace(saved, best=None, best_step=None, improved=None, stale=0)
    return replace(saved, metric=fresh.metric, test_set=fresh.test_set)
