"""Send the metrics of a run to TensorBoard, Weights & Biases and MLflow, through their own clients.

Where they send them is set as their documentation says, for example by the environment variables
WANDB_PROJECT, WANDB_MODE=offline, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. A resumed run
continues the run of these programs, whose id is in the run's folder.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from posixpath import normpath
from typing import Any, Protocol

from vil.utils.atomic_write import replace_text
from vil.utils.errors import ConfigError, one_line
from vil.utils.extras import is_installed

FILE = "trackers.json"  # in the run's folder: {tracker: id of its run}
LONGEST = 500  # characters of a parameter, a limit of older servers of MLflow
NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")  # characters that MLflow does not allow


class Tracker(Protocol):
    """A program that shows the metrics of runs. run_id: of its run, or "" if it needs none."""

    run_id: str

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder tb. Those of steps after `step` are hidden."""

    run_id = ""

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any], run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        self.writer = SummaryWriter(folder / "tb", purge_step=step + 1)
        self.flush, self.close = self.writer.flush, self.writer.close

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"{name}/{split}", value, step)


class WandB:
    """Weights & Biases. Offline, its files are in the folder wandb of the run's folder."""

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any], run_id: str) -> None:
        import wandb

        self.run = wandb.init(
            dir=folder,
            name=folder.name,
            id=run_id or None,
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step must not decrease, but the last test is of an earlier step
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run_id = self.run.id

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **{f"{split}/{name}": x for name, x in metrics.items()}})

    def flush(self) -> None:
        """Do nothing, because a process of its own sends the metrics."""

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow. The keys of the config that differ from the defaults are the run's parameters."""

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any], run_id: str) -> None:
        import mlflow

        self.mlflow = mlflow
        run = mlflow.start_run(run_id=run_id or None, run_name=folder.name)
        self.run_id = run.info.run_id
        if not run_id:  # parameters cannot be changed
            mlflow.log_params({key: str(value)[:LONGEST] for key, value in config.items()})

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        named = {f"{split}/{name}": x for name, x in metrics.items() if math.isfinite(x)}
        # MLflow drops a metric whose name is not a normalized path, such as val/pets//loss
        named = {
            normpath(NOT_IN_NAMES.sub("_", name).replace("../", "")): x for name, x in named.items()
        }
        # training must not wait for a server
        self.mlflow.log_metrics(named, step=step, run_id=self.run_id, synchronous=False)

    def flush(self) -> None:
        """Do nothing, because a thread sends the metrics."""

    def close(self) -> None:
        self.mlflow.flush_async_logging()
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def check_trackers(names: Collection[str]) -> None:
    """Raise ConfigError, with the pip command to run, if the package of a tracker is missing."""
    for name in names:
        if not is_installed(name):
            raise ConfigError(f"LOG.TRACKERS {name} needs {name}: pip install 'vil[trackers]'")


def open_trackers(
    names: Collection[str], folder: Path, config: Mapping[str, Any], step: int
) -> dict[str, Tracker]:
    """Start trackers for the steps after `step` of the run in `folder`. Returns {name: tracker}.

    config: values of config keys that the trackers show. Raises ConfigError if one does not start,
    for example because it needs a login.
    """
    file, ids, trackers = folder / FILE, {}, {}
    with suppress(OSError, ValueError):  # there is none
        ids = json.loads(file.read_text())
    for name in names:
        try:
            trackers[name] = TRACKERS[name](folder, step, config, ids.get(name, ""))
        except OSError:
            raise
        except Exception as error:  # of a server, a login or a library
            hint = "; WANDB_MODE=offline needs no login" if name == "wandb" else ""
            reason = one_line(error).rstrip(".")
            raise ConfigError(f"LOG.TRACKERS {name}: {reason}{hint}") from error
    ids |= {name: tracker.run_id for name, tracker in trackers.items() if tracker.run_id}
    if ids:
        replace_text(file, json.dumps(ids) + "\n")
    return trackers
