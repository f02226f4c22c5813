"""Calibrate the probabilities of a run's checkpoint, and find its calibration again.

The calibration of one checkpoint is stored in the run's folder, in calibration.json: the result of
`Task.calibrate`, such as {"temperature": 1.3}, and the name of the checkpoint.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from yacs.config import CfgNode

from vil.engine.checkpoint.save_load import is_name
from vil.engine.distributed import DistInfo, compute_on_main
from vil.tasks import refuse_without
from vil.tasks.base import Task
from vil.utils.atomic_write import replace_text
from vil.utils.errors import CheckpointError, ConfigError, RunFolderError, os_error_as
from vil.utils.json_text import to_json
from vil.utils.metric_format import format_pair

FILE = "calibration.json"
COMMAND = "evaluate --calibrate"
SHOWN = ("loss", "ece")  # metrics that a calibration changes


class RunCheckpoint(NamedTuple):
    """A checkpoint in the folder of a run."""

    run: Path
    name: str  # step-00000220

    @property
    def file(self) -> Path:
        """The file with the calibration of one of the run's checkpoints."""
        return self.run / FILE


def find_checkpoint(cfg: CfgNode) -> RunCheckpoint | None:
    """Return the checkpoint that MODEL.MODEL_PATH names, which is RUN/checkpoints/CHECKPOINT or a
    file in it. Returns None for other weights, and if FINETUNE.HEAD changes the head."""
    path = Path(cfg.MODEL.MODEL_PATH)
    for folder in [path, path.parent] if cfg.FINETUNE.HEAD == "keep" else []:
        if is_name(folder.name) and folder.parent.name == "checkpoints":
            return RunCheckpoint(folder.parent.parent, folder.name)
    return None


def apply_stored(cfg: CfgNode, task: Task) -> str:
    """Apply the stored calibration of the config's checkpoint to the task, if there is one.

    Returns a text that says so, or that the calibration is of another checkpoint; "" without a
    calibration. Raises CheckpointError if the file is not valid.
    """
    checkpoint = find_checkpoint(cfg)
    if checkpoint is None or not checkpoint.file.is_file():
        return ""
    stored = read(checkpoint.file)
    if stored["checkpoint"] != checkpoint.name:
        return f"{checkpoint.file} is of {stored['checkpoint']}, so it is not used"
    task.apply_calibration(stored)
    return f"calibrated with temperature {stored['temperature']:.4f} of {checkpoint.file}"


def read(file: Path) -> dict[str, Any]:
    """Read a calibration. Raises CheckpointError if the file is not valid."""
    try:
        stored = json.loads(file.read_text("utf-8"))
        name, temperature = stored["checkpoint"], float(stored["temperature"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a calibration: {_remedy(error)}") from None
    if not (math.isfinite(temperature) and temperature > 0 and isinstance(name, str)):
        raise CheckpointError(f"{file} is not a calibration: {_remedy(f'{temperature=}')}")
    return stored


def _remedy(reason: object) -> str:
    return f"{reason!s:.80}; delete it, or make it again with vil {COMMAND}"


def check(cfg: CfgNode) -> RunCheckpoint:
    """Return the checkpoint to calibrate. Raises ConfigError if the weights are not a checkpoint of
    a run, or if the task cannot be calibrated."""
    refuse_without(cfg, COMMAND)
    checkpoint = find_checkpoint(cfg)
    if checkpoint is None:
        raise ConfigError("--calibrate needs the checkpoint of a run: give --run DIR")
    return checkpoint


def calibrate(cfg: CfgNode, task: Task, model: nn.Module, dist: DistInfo) -> list[str]:
    """Calibrate the model on the validation images, apply the result to the task, and store it in
    the run's folder. Returns lines that state the metrics before and after. Raises ConfigError as
    `check` does.
    """
    checkpoint = check(cfg)
    loaders = task.test_loaders(dist, **({"part": "val"} if cfg.DATA.VAL else {}))
    name = next(iter(loaders))
    task.test_sets = {name: loaders[name]}
    before = task.evaluate(model)[name]
    calibration = task.calibrate(model)
    if not calibration:
        raise ConfigError(f"--calibrate: TASK {cfg.TASK} cannot be calibrated")
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
    return [
        f"calibrated on {name}, {before['count']} images: temperature "
        f"{calibration['temperature']:.4f}, {changes}",
        f"stored in {checkpoint.file}",
    ]


def _select(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in SHOWN if name in metrics}
