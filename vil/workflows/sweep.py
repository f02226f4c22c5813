"""Train every combination of settings of a grid, and compare the results in one table."""

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
from vil.workflows.log_forwarding import distinct_warnings
from vil.workflows.sweeping.plan import SweepPlan, SweepRun, plan_sweep, write_plan
from vil.workflows.sweeping.processes import RunPool, visible_devices
from vil.workflows.sweeping.results import ModelSize, make_table, metric_of, read_row, write_table
from vil.workflows.sweeping.source import make_grid
from vil.workflows.sweeping.state import read_state

UNUSUAL = 1  # exit code of a sweep with a run that ended in no documented way
log = logging.getLogger(__name__)
Say = Callable[[str], None]


@dataclass
class SweepResult:
    """Result of a sweep.

    status: "finished", "failed" if a run failed, "interrupted" by Ctrl-C, or "unfinished". code:
    exit code of the command. folder: of the sweep. table: all results.
    """

    status: str
    code: int
    folder: Path
    table: Table

    @property
    def rows(self) -> list[GroupRow]:
        """A row for each group of runs that differ by their seed only."""
        return self.table.groups

    @property
    def runs(self) -> list[RunRow]:
        """A row for each run."""
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
    """Train all combinations of variants and values, each in a process of `vil train`.

    config, overrides, data, imports: the config that all runs share, as in `vil.train`. grid:
    {key: values}. variants: {name: {key: value}}, for keys that belong together; the key _BASE_ is
    a config file in place of `config`. file: a grid file, see docs/guides/sweep.md. output_dir:
    folder of the sweep. jobs: runs at a time. num_processes: processes of each run. say: called
    with a line when a run begins or ends.

    Runs of `output_dir` that have finished are not repeated, others resume. A run that fails is
    recorded and does not end the sweep. On Ctrl-C the runs save their state and the status is
    "interrupted". On SIGTERM and SIGUSR1, StoppedError is raised. Raises ConfigError before the
    first run starts, if the config of any run is not valid.
    """
    made = make_grid(
        config, overrides, file=file, axes=grid, variants=variants,
        flags={"DATA.PATH": data}, imports=imports,
    )  # fmt: skip
    plan = plan_sweep(made, output_dir)
    sizes = check_models(plan)
    return run_sweep(plan, sizes, jobs=jobs, num_processes=num_processes, say=say)


def check_models(plan: SweepPlan) -> dict[str, ModelSize]:
    """Build the task and the model of each group of runs, without weights. Returns {group: size}.

    Raises ConfigError for a model that cannot be built, and for runs that are judged by different
    metrics.
    """
    sizes, metrics = {}, {}
    with distinct_warnings():
        for group, (run, *_) in plan.groups.items():
            try:
                metrics[run.name] = metric_of(run).name
                cost = analyze_cost(run.cfg)
                sizes[group] = ModelSize(cost.parameters, cost.macs)
            except NotImplementedError:  # a task of a plug-in need not count it
                sizes[group] = ModelSize()
            except ConfigError as error:
                raise ConfigError(f"run {run.name}: {error}") from error
    first = next(iter(metrics))
    for name, metric in metrics.items():
        if metric != metrics[first]:
            raise ConfigError(
                f"{name} is judged by {metric}, {first} by {metrics[first]}: a sweep compares runs "
                "of one metric"
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
    """Train the runs of a plan that have not finished, and write the table; see `sweep`.

    only: train this run alone, as one of several processes that share the work.
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
    """Train those of the runs that have not finished. Returns the signal that stopped it, or 0."""
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
    """Return the status of a sweep, and its exit code: that of the first run that failed, or else
    that was interrupted."""
    for wanted, status in (("failed", "failed"), ("interrupted", "unfinished")):
        for row in rows:
            if row.state == wanted:
                return status, row.code or UNUSUAL
    if all(row.state == "finished" for row in rows):
        return "finished", 0
    return "unfinished", ConfigError.exit_code  # a folder that another process holds
