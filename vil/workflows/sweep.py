"""Train a model for every combination of settings in a grid, and compare the results in a table."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.engine.run_dir import lock
from vil.report.sweep_table import GroupRow, RunRow, Table
from vil.utils.errors import INTERRUPTED, ConfigError, StoppedError
from vil.utils.output_paths import make_folder
from vil.workflows.analyze import analyze_cost
from vil.workflows.configure import Overrides
from vil.workflows.log_forwarding import log_warnings_once
from vil.workflows.sweeping.plan import SweepPlan, SweepRun, plan_sweep, write_plan
from vil.workflows.sweeping.processes import RunPool, visible_devices
from vil.workflows.sweeping.results import ModelSize, make_table, metric_of, read_row, write_table
from vil.workflows.sweeping.source import make_grid
from vil.workflows.sweeping.state import read_state

UNUSUAL = 1  # exit code of a sweep if the exit code of its failed run is unknown
log = logging.getLogger(__name__)
Say = Callable[[str], None]


@dataclass
class SweepResult:
    """Result of a sweep.

    status: "finished", "failed" if a run failed, "interrupted" if Ctrl-C stopped the sweep, or
    "unfinished" if runs have not finished for another reason.
    code: exit code of the command `vil sweep`.
    folder: the sweep's folder.
    table: results of all runs.
    """

    status: str
    code: int
    folder: Path
    table: Table

    @property
    def rows(self) -> list[GroupRow]:
        """A table row for each group of runs that differ only in their seed."""
        return self.table.groups

    @property
    def runs(self) -> list[RunRow]:
        """A table row for each run."""
        return self.table.runs


def sweep(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    output_dir: str | Path,
    grid: Mapping[str, Sequence[Any]] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    file: str | Path | None = None,
    data: str | Path | None = None,
    imports: Sequence[str] = (),
    jobs: int = 1,
    num_processes: int = 1,
    say: Say = log.info,
) -> SweepResult:
    """Train a model for each combination of a variant and grid values, in separate processes of
    `vil train`.

    config, overrides, data, imports: the config that all runs share, as in `vil.train`.
    output_dir: folder of the sweep.
    grid: {config key: values to try}.
    variants: named sets of settings that change together, as {name: {key: value}}; the key _BASE_
    is a config file that replaces `config`.
    file: a grid file, see docs/guides/sweep.md.
    jobs: number of runs to train at a time.
    num_processes: number of processes of each run.
    say: called with a line of text when a run begins or ends.

    Finished runs in `output_dir` are not repeated, and other runs resume. A run that fails is
    recorded and does not end the sweep. On Ctrl-C, the runs save their state and the status is
    "interrupted". On SIGTERM and SIGUSR1, StoppedError is raised. If the config of any run is
    invalid, ConfigError is raised before the first run starts.
    """
    made = make_grid(
        config, overrides, file=file, axes=grid, variants=variants,
        flags={"DATA.PATH": data}, imports=imports,
    )  # fmt: skip
    plan = plan_sweep(made, output_dir)
    sizes = check_models(plan)
    return run_sweep(plan, sizes, jobs=jobs, num_processes=num_processes, say=say)


def check_models(plan: SweepPlan) -> dict[str, ModelSize]:
    """Check that the model of every run can be built. Returns {name of a group: size of its model}.

    A group consists of the runs that differ only in their seed. No weights are allocated. Raises
    ConfigError if a model cannot be built, or if runs have different metrics.
    """
    sizes, metrics = {}, {}
    with log_warnings_once():
        for group, (run, *_) in plan.groups.items():
            try:
                metrics[run.name] = metric_of(run).name
                cost = analyze_cost(run.cfg)
                sizes[group] = ModelSize(cost.parameters, cost.macs)
            except NotImplementedError:  # a plug-in's task without `cost`
                sizes[group] = ModelSize()
            except ConfigError as error:
                raise ConfigError(f"run {run.name}: {error}") from error
    first = next(iter(metrics))
    for name, metric in metrics.items():
        if metric != metrics[first]:
            raise ConfigError(
                f"run {name} has the metric {metric}, but run {first} has {metrics[first]}: all "
                "runs of a sweep must have the same metric"
            )
    return sizes


def run_sweep(
    plan: SweepPlan,
    sizes: Mapping[str, ModelSize],
    *,
    only: SweepRun | None = None,
    jobs: int = 1,
    num_processes: int = 1,
    say: Say = log.info,
) -> SweepResult:
    """Train the unfinished runs of a sweep, and write the table of results to the sweep's folder.

    sizes: result of `check_models`. only: the only run that this process trains, if other processes
    train the other runs. None: train all runs. jobs, num_processes, say: see `sweep`.
    """
    if only is None:
        make_folder(plan.folder, "--output")
        with lock(plan.folder / "sweep.lock"):
            write_plan(plan)
            number = train_runs(plan, plan.runs, jobs, num_processes, say)
    else:
        number = train_runs(plan, [only], 1, num_processes, say)
    table = make_table(plan, sizes)
    write_table(plan.folder, table)
    if number:
        stop = StoppedError(signal.Signals(number))
        if stop.exit_code != INTERRUPTED:
            raise stop
        return SweepResult("interrupted", INTERRUPTED, plan.folder, table)
    rows = [row for row in table.runs if only is None or row.name == only.name]
    return SweepResult(*outcome(rows), plan.folder, table)


def train_runs(
    plan: SweepPlan, runs: Sequence[SweepRun], jobs: int, num_processes: int, say: Say
) -> int:
    """Train the unfinished runs in `runs`, `jobs` at a time. say: called with a line of text when a
    run begins or ends. Returns the number of the signal that stopped the training, or 0 if there
    was none."""
    metric, numbers = metric_of(runs[0]), {run.name: i for i, run in enumerate(plan.runs, start=1)}
    waiting = [run for run in runs if read_state(run).state != "finished"]
    if len(runs) > len(waiting) > 0:
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs have finished")

    def say_begin(run: SweepRun) -> None:
        state = read_state(run)
        how = f"resumes after step {state.step}" if state.step else "starts"
        say(f"[{numbers[run.name]}/{len(plan.runs)}] {run.name} {how}")

    def say_end(run: SweepRun) -> None:
        row = read_row(run, metric)
        result = "" if row.metric is None else f"{metric.name} {row.metric:.2f}"
        taken = f"{timedelta(seconds=round(row.seconds or 0))} of training"
        end = f"{result}, {taken}" if row.state == "finished" else row.reason
        say(f"[{numbers[run.name]}/{len(plan.runs)}] {run.name} {row.state}: {end}")

    pool = RunPool(jobs, num_processes, visible_devices(), on_begin=say_begin, on_end=say_end)
    return pool.train(waiting)


def outcome(rows: Sequence[RunRow]) -> tuple[str, int]:
    """Return the status and the exit code of a sweep. rows: a row for each run.

    - If a run failed: "failed", and its exit code.
    - Otherwise, if a run was interrupted: "unfinished", and its exit code.
    - Otherwise, if all runs are finished: "finished", and 0.
    - Otherwise, another process is training a run: "unfinished", and 2, as for a ConfigError.
    """
    for wanted, status in (("failed", "failed"), ("interrupted", "unfinished")):
        for row in rows:
            if row.state == wanted:
                return status, row.code or UNUSUAL
    if all(row.state == "finished" for row in rows):
        return "finished", 0
    return "unfinished", ConfigError.exit_code  # another process locks a run
