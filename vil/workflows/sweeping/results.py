"""Read the results of a sweep's runs, and write its table and plots."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vil.config.defaults import leaves
from vil.engine.loop import Metric
from vil.report import sweep_plots
from vil.report.run_record import RunRecord
from vil.report.sweep_table import (
    RunRow,
    Table,
    markdown,
    runs_csv,
    summarize,
    summary_cells,
    summary_csv,
)
from vil.tasks import task_for, with_num_classes
from vil.utils.atomic_write import replace_text
from vil.utils.errors import ConfigError, RunFolderError, os_error_as
from vil.utils.machine import processor
from vil.utils.text_table import align
from vil.workflows.sweeping.grid import short_key
from vil.workflows.sweeping.plan import SEED, SweepPlan, SweepRun
from vil.workflows.sweeping.state import read_state


class ModelSize(NamedTuple):
    """Size of a model: number of parameters, and number of multiply-accumulates for one image. A
    number is None if it is unknown."""

    parameters: int | None = None
    macs: int | None = None


def metric_of(run: SweepRun) -> Metric:
    """Return the metric by which the task of a run ranks models, such as top-1 accuracy."""
    return task_for(with_num_classes(run.cfg), torch.device("cpu")).metric


def make_table(plan: SweepPlan, sizes: Mapping[str, ModelSize]) -> Table:
    """Read the results of all runs of a sweep into a table. sizes: {name of a group of runs: size
    of its model}. If a group is not in `sizes`, the cells for the size of its model are empty."""
    metric = metric_of(plan.runs[0])
    rows = {run.name: read_row(run, metric, plan.keys) for run in plan.runs}
    groups = [
        summarize(name, [rows[run.name] for run in runs], *sizes.get(name, ModelSize()))
        for name, runs in plan.groups.items()
    ]
    return Table(
        title=plan.folder.resolve().name,
        metric=metric.name,
        label=metric.label or metric.name,
        unit=metric.unit,
        keys={key: short_key(key, plan.keys) for key in plan.keys},
        groups=groups,
        runs=list(rows.values()),
    )


def read_row(run: SweepRun, metric: Metric, keys: Sequence[str] = ()) -> RunRow:
    """Read the state and the logged results of a run into a table row. metric: metric by which runs
    are compared. keys: config keys whose values are added to the row."""
    state, values = read_state(run), leaves(run.cfg)
    row = RunRow(
        name=run.name,
        group=run.group,
        settings={key: values.get(key) for key in keys},
        seed=values[SEED],
        state=state.state,
        code=state.code,
        reason=state.reason,
        step=state.step,
    )
    try:
        record = RunRecord.read(run.folder)
    except RunFolderError:  # the reason is in the row
        return row
    logged = next(iter(record.evaluations().values()), [])
    results = [point[metric.name] for point in logged if metric.name in point]
    tested = next(iter(record.evaluations("test").values()), [])
    tests = [point[metric.name] for point in tested if metric.name in point]
    steps = [point for point in record.points if point["split"] == "train"]
    speeds = [point["img/s"] for point in steps if "img/s" in point]
    memory = [point["mem"] for point in steps if "mem" in point]
    return row._replace(
        metric=results[-1] if results else None,
        best=(max if metric.higher_is_better else min)(results) if results else None,
        test=tests[-1] if tests else None,
        images_per_second=statistics.median(speeds) if speeds else None,
        memory_mib=max(memory) if memory else None,
        seconds=record.training_seconds() if steps else None,
    )


def format_summary(table: Table) -> str:
    """Format a table as text in aligned columns, one line per group of runs that differ only in
    their seed."""
    return align(summary_cells(table))


def write_table(folder: Path, table: Table) -> list[Path]:
    """Write a sweep's results to runs.csv, summary.csv, summary.md and plots in a folder. Returns
    the files. Raises ConfigError if the folder cannot be written."""
    notes = [
        f"{table.label}: from the last evaluation, mean ± standard deviation over the seeds. "
        "test: of the best checkpoint on the test set, if there is one besides DATA.VAL. "
        "images/s: median speed of training. memory: peak of the process, or of tensors on a GPU. "
        f"Measured on {processor()}."
    ]
    with os_error_as(ConfigError, f"--output {folder}"):
        plots = sweep_plots.draw(table, folder / "plots")
        names = [path.relative_to(folder).as_posix() for path in plots]
        texts = {
            "runs.csv": runs_csv(table),
            "summary.csv": summary_csv(table),
            "summary.md": markdown(table, names, notes),
        }
        for name, text in texts.items():
            replace_text(folder / name, text)
    return [*(folder / name for name in texts), *plots]
