"""What a run says, once for each reader: people, scripts, TensorBoard and the terminal.

log.txt        one line per log point, `key value` pairs in a fixed order behind an ISO time stamp
metrics.jsonl  the same numbers, one JSON object per line; no (step, split) stands twice
tb/            the same numbers for TensorBoard
terminal       the lines of log.txt, with a progress bar below them; without a terminal only lines

On ranks other than 0 every method returns at once.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import torch

from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.metric_format import pairs

REDRAW_SECONDS = 0.2


class RunLogger:
    """The text log is open from the start; `begin` opens the rest once the first step is known."""

    def __init__(self, folder: Path, *, enabled: bool):
        self.folder, self.enabled = folder, enabled
        self.bar = self.metrics = self.tensorboard = None
        self.drawn, self.cannot = 0.0, ""
        self.last_evaluation: dict[str, dict] = {}
        self.text = open(folder / "log.txt", "a", 1, **TEXT) if enabled else None  # noqa: SIM115

    def begin(self, step: int, end: int, *, steps_per_epoch: int, batch_size: int) -> None:
        """Figures follow for the steps after `step`; what an abandoned attempt wrote is dropped."""
        if not self.enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # a second to import: training only

        self.end, self.steps_per_epoch, self.batch_size = end, steps_per_epoch, batch_size
        rewind(self.folder / "metrics.jsonl", step)
        self.metrics = open(self.folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.tensorboard = SummaryWriter(self.folder / "tb", purge_step=step + 1)
        if sys.stdout.isatty():
            self.bar = open_bar(step, end)

    def say(self, text: str) -> None:
        """A line on the terminal and in log.txt."""
        if not self.enabled:
            return
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}"
        with self.patient():
            self.text.write(f"{line}\n")
        if self.bar:
            self.bar.console.out(line, highlight=False)
        else:
            print(line, flush=True)

    def tick(self, step: int) -> None:
        """Move the progress bar."""
        if not self.bar:
            return
        due = time.monotonic() - self.drawn > REDRAW_SECONDS
        self.bar.update(self.bar.task_ids[0], completed=step, refresh=due)
        if due:
            self.drawn = time.monotonic()

    def training(self, step: int, lr: float, figures: dict[str, float]) -> None:
        """The means since the last line, as `Meter.read` gives them: the task's, time, data."""
        if not self.enabled:
            return
        own = {name: value for name, value in figures.items() if name not in ("time", "data")}
        figures = {
            **own,
            "lr": lr,
            "time": figures["time"],
            "data": figures["data"],
            "img/s": self.batch_size / figures["time"],
            "mem": memory_mb(),
        }
        eta = timedelta(seconds=round((self.end - step) * figures["time"]))
        self.say(f"train {self.position(step)} eta {str(eta).replace(' ', '')} {pairs(figures)}")
        self.record(step, "train", figures)

    def evaluation(self, step: int, results: dict[str, dict]) -> None:
        """One line per test set; entries that are not numbers (per-class tables) are left out."""
        self.last_evaluation = results
        if not self.enabled:
            return
        for name, figures in results.items():
            figures = {k: v for k, v in figures.items() if isinstance(v, (int, float))}
            self.say(f"val {self.position(step)} set {name} {pairs(figures)}")
            self.record(step, f"val/{name}", figures)
        with self.patient():
            self.tensorboard.flush()

    def failure(self, step: int, count: int) -> None:
        """So many checkpoints in a row could not be written."""
        if self.enabled:
            self.record(step, "save", {"failed": count})

    def position(self, step: int) -> str:
        per_epoch = self.steps_per_epoch
        return f"epoch {step / per_epoch:.2f}/{self.end / per_epoch:g} step {step}/{self.end}"

    def record(self, step: int, split: str, figures: dict[str, float]) -> None:
        """A line of metrics.jsonl, and TensorBoard's scalars. JSON knows no NaN: null."""
        where = {"step": step, "epoch": step / self.steps_per_epoch, "split": split}
        numbers = {k: v if math.isfinite(v) else None for k, v in figures.items()}
        with self.patient():
            self.metrics.write(json.dumps({**where, "wall": time.time(), **numbers}) + "\n")
        with self.patient():
            for name, value in figures.items():
                self.tensorboard.add_scalar(f"{name}/{split}", value, step)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        for file in filter(None, (self.tensorboard, self.metrics, self.text)):
            with self.patient():
                file.close()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, a file that cannot be written does not end the run: stderr tells of it, once."""
        try:
            yield
        except OSError as error:
            if self.cannot != str(error):
                print(f"vil: the log cannot be written: {error}", file=sys.stderr, flush=True)
            self.cannot = str(error)


def rewind(file: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl beyond `step`, and a last line that was cut by a crash."""
    if not file.exists():
        return
    lines = file.read_text(errors="replace").splitlines()
    kept = [line for line in lines if step_of(line) <= step]
    replace_text(file, "".join(f"{line}\n" for line in kept))


def step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for one that is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def open_bar(step: int, end: int):
    """A started rich progress bar with one task.

    It draws itself only when told to: rich's thread could hold the terminal's lock while loader
    workers are forked, and a worker that warns would then wait for ever.
    """
    from rich import progress

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    bar = progress.Progress(*columns, transient=True, auto_refresh=False)
    bar.add_task("train", completed=step, total=end)
    bar.start()
    return bar


def memory_mb() -> float:
    """Peak memory: the GPU's tensors where there is one, else what this process has resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
