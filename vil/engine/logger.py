"""Log a run to text, JSON, trackers such as TensorBoard, and the terminal.

log.txt        one line per message: an ISO time stamp and text; metrics are `key value` pairs
metrics.jsonl  the metrics, one JSON object per line, at most one for each (step, split)
tb/            the metrics for TensorBoard, by vil/engine/trackers.py
terminal       shorter lines, with the time of day, and a progress bar below them, which replaces
               the lines about training. Output that is not a terminal has one line per message

On ranks other than 0, all methods do nothing.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from vil.engine.remaining_time import RemainingTime
from vil.engine.slow_steps import SlowSteps
from vil.engine.trackers import Tracker, open_trackers
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.console import IN_LINES, WIDTH, echo, echo_error, fit_to_terminal
from vil.utils.errors import one_line
from vil.utils.machine import now
from vil.utils.metric_format import DETAILS, fit_pairs, format_pair, format_pairs

if TYPE_CHECKING:
    from rich.progress import Progress

REDRAW_SECONDS = 0.2
CLOCK = "%H:%M:%S"  # time of day, before the lines on the terminal
COLUMNS = WIDTH - len("12:00:00 ")  # of a line on the terminal without its time
# training metrics that the terminal shows first, and those that only the files have
FIRST, FILE_ONLY = ("loss", "skipped", "lr", "img/s"), ("grad_norm", "time", "data", "mem")
LONGEST_SET = 30  # characters of the name of a test set on the terminal
FIRST_SECONDS = 10.0  # until `first_progress` logs a line
SLOW_DATA = 0.2  # share of a step's time above which waiting for data is reported


class RunLogger:
    """A logger that writes log.txt. After a call of `begin`, it also writes metrics.jsonl,
    trackers and a progress bar.

    enabled: whether to write at all; False on ranks other than 0.
    open_trackers: function that `begin` calls with the first step, to start {name: tracker}.
    """

    def __init__(self, folder: Path, *, enabled: bool):
        self.folder, self.enabled = folder, enabled
        self.bar: Progress | None = None
        self.metrics: TextIO | None = None
        self.trackers: dict[str, Tracker] = {}
        self.open_trackers: Callable[[int], dict[str, Tracker]] = partial(
            open_trackers, ["tensorboard"], folder, {}
        )
        self.drawn_time, self.last_error = 0.0, ""
        self.said: set[str] = set()  # by `say_once`
        self.last_evaluation: dict[str, dict] = {}
        self.text = open(folder / "log.txt", "a", 1, **TEXT) if enabled else None  # noqa: SIM115

    def begin(
        self,
        step: int,
        end: int,
        *,
        steps_per_epoch: int,
        batch_size: int,
        evaluates: bool = False,
    ) -> None:
        """Start to log metrics of the steps after `step`, to files and a progress bar.

        Removes records of these steps that an earlier attempt left.

        end: the last step of the run.
        batch_size: images per step over all ranks.
        evaluates: whether the run begins with an evaluation at `step`. If so, records of an earlier
        evaluation at `step` are removed too.
        """
        if not self.enabled:
            return
        self.end, self.steps_per_epoch, self.batch_size = end, steps_per_epoch, batch_size
        self.data_hint_given = False
        self.first_step_time = 0.0
        self.slow_steps = SlowSteps()
        self.remaining = RemainingTime(step, end, time.monotonic())
        self._reopen_metrics(
            lambda at, split: at > step or (evaluates and at == step and split.startswith("val/"))
        )
        self.trackers = self.open_trackers(step)
        if sys.stdout.isatty():
            self.bar = open_bar(step, end, self.epoch(step))

    def _reopen_metrics(self, is_outdated: Callable[[float, str], bool]) -> None:
        """Remove outdated and incomplete lines from metrics.jsonl, and open it to append lines.

        A line is outdated if `is_outdated` returns True for its step and split. A crash may have
        left a line incomplete.
        """
        file, previous = self.folder / "metrics.jsonl", self.metrics
        if file.exists():
            lines = file.read_text(errors="replace").splitlines()
            kept = [line for line in lines if (at := position_of(line)) and not is_outdated(*at)]
            replace_text(file, "".join(f"{line}\n" for line in kept))
        self.metrics = open(file, "a", buffering=1)  # noqa: SIM115
        if previous:
            previous.close()

    def say(self, text: str, short: str | None = None) -> None:
        """Write a line to the terminal and to log.txt.

        short: text for the terminal instead of `text`; "" to write only to log.txt.
        """
        if self.text is None:
            return
        with self.ignore_os_errors():
            self.text.write(f"{now()} {text}\n")
        if short == "":
            return
        line = fit_to_terminal(f"{time.strftime(CLOCK)} {short or text}", indent=9)
        if self.bar:
            with suppress(OSError):
                self.bar.console.out(line.translate(IN_LINES), highlight=False)
        else:
            echo(line)

    def say_once(self, text: str) -> None:
        """Write a line like `say`, unless the same text was written before."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)

    def tick(self, step: int) -> None:
        """Show `step` in the progress bar."""
        if not self.bar:
            return
        due = time.monotonic() - self.drawn_time > REDRAW_SECONDS
        with suppress(OSError):  # the terminal is gone
            options = dict(completed=step, epoch=self.epoch(step), refresh=due)
            self.bar.update(self.bar.task_ids[0], **options)
        if due:
            self.drawn_time = time.monotonic()

    def training(self, step: int, lr: float, metrics: dict[str, float]) -> None:
        """Log the learning rate and the training metrics. metrics: result of `Meter.read`."""
        if not self.enabled:
            return
        times = {"time": metrics["time"], "data": metrics["data"]}
        metrics = {name: value for name, value in metrics.items() if name not in times}
        rate = self.batch_size / times["time"]
        metrics |= {"lr": lr, **times, "img/s": rate, "mem": memory_mb()}
        left = self.remaining.update(step, times["time"], time.monotonic())
        text = f"train {self.position(step)} eta {as_time(left)} {format_pairs(metrics)}"
        short = f"train {self.epoch(step)} eta {as_time(left)} "
        shown = {name: value for name, value in metrics.items() if name not in FILE_ONLY}
        short += fit_pairs(shown, COLUMNS - len(short), FIRST)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], loss=format_pair("loss", metrics["loss"]))
        self.say(text, "" if self.bar else short)
        self.record(step, "train", metrics)
        self._hint_at_data(times["data"] / times["time"])

    def watch_speed(self, seconds: float) -> None:
        """Log a hint if steps have become slow. seconds: of a step, without waiting for data."""
        if self.enabled and (text := self.slow_steps.add(seconds)):
            self.say(f"hint: {text}")

    def _hint_at_data(self, waiting: float) -> None:
        """Log once how to load data faster, if steps wait for data. waiting: fraction of the time
        of a step that is spent waiting."""
        # the first line includes the start of the loader workers
        if self.data_hint_given or self.remaining.lines < 2 or waiting < SLOW_DATA:
            return
        self.data_hint_given = True
        self.say(
            f"hint: steps wait for data {100 * waiting:.0f} % of their time: raise "
            "DATALOADER.WORKERS, or shrink the images"
        )

    def first_progress(self, step: int) -> None:
        """Log the remaining time after FIRST_SECONDS, unless metrics have been logged by then.

        Logs one line. If it follows the first step, which is slower than the other steps, a second
        line with a better estimate follows the second step.
        """
        if not self.enabled or self.remaining.lines or self.first_step_time == math.inf:
            return
        now, began, start = time.monotonic(), self.remaining.began, self.remaining.start
        self.first_step_time = self.first_step_time or now
        if now - began < FIRST_SECONDS:
            return
        steps = step - start
        spent = now - self.first_step_time if steps > 1 else now - began
        per_step = spent / max(steps - 1, 1)
        times = {"time": per_step, "img/s": self.batch_size / per_step}
        left = as_time((self.end - step) * per_step)
        about = "" if steps > 1 else " (overestimated: the first step includes startup)"
        text = f"train {self.position(step)} eta {left}{about} {format_pairs(times)}"
        self.say(text, "" if self.bar else f"train {self.epoch(step)} eta {left}{about}")
        if steps > 1:
            self.first_step_time = math.inf

    def evaluation(self, step: int, results: dict[str, dict], metric: str = "") -> None:
        """Log the results of an evaluation during training, one line per test set. The metrics in
        DETAILS are written to metrics.jsonl and TensorBoard only.

        results: {name of the test set: {metric: value}}. Values that are not numbers, such as
        per-class tables, are left out. metric: the metric that selects the best checkpoint.
        """
        self.last_evaluation = results
        self.results(step, "val", results, metric, hidden={*DETAILS} - {metric})

    def results(
        self,
        step: int,
        part: str,
        results: dict[str, dict],
        metric: str,
        *,
        hidden: Collection[str] = (),
    ) -> None:
        """Log the results of an evaluation, one line per test set. Before `begin` is called, writes
        only to log.txt and the terminal. The terminal shows as many metrics as fit in a line.

        part: "val" during training, or "test". In metrics.jsonl, "split" is <part>/<test set>. With
        "test", the lines of an earlier test at the same step are replaced. results, metric: see
        `evaluation`. hidden: metrics that the line leaves out.
        """
        if not self.enabled:
            return
        if part == "test" and self.metrics:
            splits = {f"{part}/{name}" for name in results}
            with self.ignore_os_errors():
                self._reopen_metrics(lambda at, split: at == step and split in splits)
        for name, metrics in results.items():
            metrics = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
            shown = {k: v for k, v in metrics.items() if k not in hidden}
            where, brief = f"step {step}", f"step {step}"
            if self.metrics:
                where, brief = self.position(step), self.epoch(step)
            short = f"{part} {brief} set {name:.{LONGEST_SET}} "
            short += fit_pairs(shown, COLUMNS - len(short), [metric])
            self.say(f"{part} {where} set {name} {format_pairs(shown)}", short)
            if self.metrics:
                self.record(step, f"{part}/{name}", metrics)
        self._track("flush")

    def position(self, step: int) -> str:
        return f"{self.epoch(step)} step {step}/{self.end}"

    def epoch(self, step: int) -> str:
        per_epoch = self.steps_per_epoch
        return f"epoch {step / per_epoch:.2f}/{self.end / per_epoch:g}"

    def record(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Write metrics to metrics.jsonl, with null for NaN and Inf, and to the trackers.

        split: name of the group of metrics, such as "train" or "val/<test set>".
        """
        if self.metrics is None:
            return
        where = {"step": step, "epoch": step / self.steps_per_epoch, "split": split}
        numbers = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        with self.ignore_os_errors():
            self.metrics.write(json.dumps({**where, "wall": time.time(), **numbers}) + "\n")
        self._track("log", step, split, metrics)

    def _track(self, method: str, *args: Any) -> None:
        """Call a method of each tracker. One that fails is reported, and gets no more metrics; if
        only its file or server cannot be reached, it gets the next ones."""
        for name, tracker in list(self.trackers.items()):
            with self.ignore_os_errors():
                try:
                    getattr(tracker, method)(*args)
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001 - any of another program
                    del self.trackers[name]
                    self.say(f"WARNING {name} gets no more metrics: {one_line(error)}")

    def close(self) -> None:
        with suppress(OSError):
            if self.bar:
                self.bar.stop()
        self._track("close")
        for file in filter(None, (self.metrics, self.text)):
            with self.ignore_os_errors():
                file.close()

    @contextmanager
    def ignore_os_errors(self) -> Iterator[None]:
        """Catch an OSError that is raised inside the context, and print it to stderr unless the
        previous error was the same."""
        try:
            yield
        except OSError as error:
            if self.last_error != str(error):
                echo_error(f"vil: the log cannot be written: {error}")
            self.last_error = str(error)


def as_time(seconds: float) -> str:
    """Format a duration as h:mm:ss, or 1day,h:mm:ss."""
    return str(timedelta(seconds=round(seconds))).replace(" ", "")


def position_of(line: str) -> tuple[float, str] | None:
    """Return the step and split of a line of metrics.jsonl; None if the line is not valid."""
    try:
        point = json.loads(line)
        return float(point["step"]), str(point.get("split"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def open_bar(step: int, end: int, epoch: str):
    """Start and return a progress bar (rich.progress.Progress) for the steps `step` to `end`.

    The bar shows its fields `epoch` and `loss`. epoch: the first value of the former.
    """
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.fields[epoch]} {task.fields[loss]}"),
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    # bypass a StandardStream, because it escapes the bar's control characters
    console = Console(file=getattr(sys.stdout, "stream", sys.stdout))
    # no refresh thread: a loader worker, forked while it holds the terminal's lock, would hang
    bar = progress.Progress(*columns, console=console, transient=True, auto_refresh=False)
    bar.add_task("train", completed=step, total=end, epoch=epoch, loss="")
    bar.start()
    return bar


def memory_mb() -> float:
    """Return the peak memory of this process in MiB: tensor memory on the GPU if CUDA is in use,
    otherwise resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
