"""Calibrate the probabilities that a run's checkpoint predicts, and apply a stored calibration.

In the run's folder, calibration.json has the name of one checkpoint and the result of
`Task.calibrate`, such as {"temperature": 1.3} or {"thresholds": {"cat": 0.4}}.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vil.engine.checkpoint.save_load import is_name
from vil.engine.distributed import DistInfo, compute_on_main
from vil.pretrained.state_dict_io import find_weights
from vil.tasks.base import Task
from vil.utils.atomic_write import replace_text
from vil.utils.errors import CheckpointError, RunFolderError, os_error_as
from vil.utils.json_text import to_json
from vil.utils.metric_format import format_pair
from vil.utils.plural import plural

FILE = "calibration.json"
COMMAND = "evaluate --calibrate"
SHOWN = ("loss", "ece", "macro_f1")  # metrics that a calibration changes


class RunCheckpoint(NamedTuple):
    """Checkpoint of a run. run: the folder of the run. name: name of the checkpoint, such as
    "step-00000220"."""

    run: Path
    name: str  # step-00000220

    @property
    def file(self) -> Path:
        """Path of the run's calibration.json. The file may be missing, or may have the calibration
        of another checkpoint of the run."""
        return self.run / FILE


def find_checkpoint(weights: str, data_dir: str, head: str) -> RunCheckpoint | None:
    """Return the checkpoint of a run that a path points to.

    weights: the path, which may be relative to `data_dir`: the folder of a run (for its best
    checkpoint), the folder of a checkpoint, or the file in one whose weights are used. Returns None
    for any other path, such as weights beside their average, and if `head`, the value of
    FINETUNE.HEAD, changes the head.
    """
    if not weights or head != "keep":
        return None
    path = find_weights(Path(weights) if Path(weights).exists() else Path(data_dir, weights))
    path = Path(os.path.abspath(path))
    for folder in (path, path.parent):
        if is_name(folder.name) and folder.parent.name == "checkpoints":
            is_used = path == folder or path == find_weights(folder)
            return RunCheckpoint(folder.parent.parent, folder.name) if is_used else None
    return None


def apply_stored(checkpoint: RunCheckpoint | None, task: Task) -> str:
    """Apply the stored calibration of a checkpoint to the task, if there is one.

    Returns a text for the log: that the calibration is applied, or that it belongs to another
    checkpoint. Returns "" if none is stored. Raises CheckpointError if calibration.json is invalid.
    """
    if checkpoint is None or not checkpoint.file.is_file():
        return ""
    stored = read(checkpoint.file)
    if stored["checkpoint"] != checkpoint.name:
        return f"{checkpoint.file} is not used: it belongs to checkpoint {stored['checkpoint']}"
    try:
        task.apply_calibration(stored)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.file} belongs to another model {_remedy(error)}"
        ) from None
    return f"calibrated with {describe(stored)} of {checkpoint.file}"


def describe_unused(weights: str, data_dir: str, head: str) -> str:
    """Return a text that a file written from a checkpoint does not have its stored calibration, or
    "" if none is stored. The arguments are those of `find_checkpoint`."""
    checkpoint = find_checkpoint(weights, data_dir, head)
    if checkpoint is None or not checkpoint.file.is_file():
        return ""
    stored = read(checkpoint.file)
    if stored["checkpoint"] != checkpoint.name:
        return ""
    advice = "divide its logits by the temperature"
    if "thresholds" in stored:
        advice = "apply the thresholds to its probabilities"
    return f"the file is not calibrated: {advice} in {checkpoint.file} ({describe(stored)})"


def describe(calibration: Mapping[str, Any]) -> str:
    """Describe a calibration in a few words: its temperature, or the number of its thresholds."""
    if "temperature" in calibration:
        return f"temperature {calibration['temperature']:.4f}"
    return f"{len(calibration['thresholds'])} thresholds"


def read(file: Path) -> dict[str, Any]:
    """Read the dict in a calibration.json. Raises CheckpointError if the file is invalid."""
    try:
        stored = json.loads(file.read_text("utf-8"))
        name = stored["checkpoint"]
        values = [*stored.get("thresholds", {}).values()] or [stored["temperature"]]
        usable = all(math.isfinite(float(value)) and float(value) > 0 for value in values)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a valid calibration {_remedy(error)}") from None
    if not (usable and isinstance(name, str)):
        reason = f"it has no checkpoint name, or values that are not above 0: {values[:3]}"
        raise CheckpointError(f"{file} is not a valid calibration {_remedy(reason)}")
    return stored


def _remedy(reason: object) -> str:
    return f"({reason!s:.80}): delete the file, or write a new one with vil {COMMAND}"


def calibrate(checkpoint: RunCheckpoint, task: Task, model: nn.Module, dist: DistInfo) -> list[str]:
    """Calibrate the model on the first set in DATA.VAL or, if DATA.VAL is empty, in DATA.TEST.

    Applies the calibration to the task, and stores it in the folder of the checkpoint's run.
    Returns lines of text with the metrics before and after. Returns [] if the task does not support
    calibration.
    """
    loaders = task.test_loaders(dist)
    name = next(iter(loaders))
    task.test_sets = {name: loaders[name]}
    before = task.evaluate(model)[name]
    calibration = task.calibrate(model)
    if not calibration:
        return []
    task.apply_calibration(calibration)
    after = task.evaluate(model)[name]
    stored = {**calibration, "checkpoint": checkpoint.name}
    stored |= {"before": _select(before), "after": _select(after)}

    def store() -> None:
        with os_error_as(RunFolderError, f"{checkpoint.file} cannot be written"):
            replace_text(checkpoint.file, to_json(stored, indent=1) + "\n")

    compute_on_main(store)
    changes = ", ".join(
        f"{format_pair(key, value)} before, {format_pair(key, after[key])} after"
        for key, value in _select(before).items()
    )
    images = plural(before["count"], "image")
    lines = [
        f"calibrated on {name}, {images}: {describe(calibration)}, {changes}",
        f"stored in {checkpoint.file}",
    ]
    if after.get("ece", 0) > before.get("ece", 0):
        lines.append("ece rose: calibrate on more images, or delete this file to undo it")
    return lines


def _select(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in SHOWN if name in metrics}
