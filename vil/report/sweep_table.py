"""Table of the results of a sweep, as CSV and Markdown.

The table has a row for each run, and a row for each group of runs that differ only in their seed,
with the mean and the standard deviation of the metric.
"""

import csv
import io
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from vil.report.page import short
from vil.utils.metric_format import digits_for


class RunRow(NamedTuple):
    """Results of one run of a sweep. Numbers are None if they are not logged yet."""

    name: str
    group: str  # name of the group of runs that differ only in their seed
    settings: dict[str, Any]  # {config key that the sweep varies: value}
    seed: int
    state: str  # such as "running", see `vil.workflows.sweeping.state.RunState`
    code: int | None = None  # exit code of the last attempt to train the run
    reason: str = ""  # why this attempt failed
    step: int = 0  # number of finished training steps
    metric: float | None = None  # the sweep's metric at the last evaluation
    best: float | None = None  # best value of the metric over all evaluations
    # metric of the best checkpoint on the first set of DATA.TEST, if DATA.VAL is set
    test: float | None = None
    images_per_second: float | None = None  # median training speed
    memory_mib: float | None = None  # peak memory, see `vil.engine.logger.memory_mb`
    seconds: float | None = None  # time of all training steps


class GroupRow(NamedTuple):
    """Mean results of a group of runs that differ only in their seed.

    metric, images_per_second and memory_mib are means over the finished runs.
    """

    name: str
    settings: dict[str, Any]
    metric: float | None
    spread: float | None  # sample standard deviation of the metric; None below two runs
    values: list[float]  # metric of each finished run
    tests: list[float]  # metric in the final test of each run that has one
    seeds: int  # number of finished runs
    runs: int  # number of all runs
    images_per_second: float | None
    memory_mib: float | None
    parameters: int | None = None  # number of parameters of the model
    macs: int | None = None  # multiply-accumulates of the model for one image


class Table(NamedTuple):
    """Results of a sweep."""

    title: str  # name of the sweep
    metric: str  # name of the metric by which runs are compared
    label: str  # label of the metric, for headings
    unit: str  # unit of the metric, for headings
    keys: dict[str, str]  # {config key that the sweep varies: short name}
    groups: list[GroupRow]
    runs: list[RunRow]


def summarize(
    name: str, runs: Sequence[RunRow], parameters: int | None, macs: int | None
) -> GroupRow:
    """Compute the mean results of a group of runs that differ only in their seed.

    name: name of the group. parameters: number of parameters of the model. macs:
    multiply-accumulates of the model for one image. Both are None if unknown.
    """
    done = [run for run in runs if run.state == "finished" and run.metric is not None]
    values = [run.metric for run in done]
    settings = {key: value for key, value in runs[0].settings.items() if key != "SEED"}
    return GroupRow(
        name,
        settings,
        mean(values),
        deviation(values),
        values,
        [run.test for run in done if run.test is not None],
        len(done),
        len(runs),
        mean([run.images_per_second for run in done]),
        mean([run.memory_mib for run in done]),
        parameters,
        macs,
    )


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation, or None if there are fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def summary_csv(table: Table) -> str:
    """Format the results as CSV, one row per group of runs that differ only in their seed. Numbers
    are not rounded. Missing numbers are empty."""
    keys = [key for key in table.keys if key != "SEED"]
    head = ["name", *keys, table.metric, f"{table.metric}_std", "seeds", "runs"]
    head += ["images_per_second", "memory_mib", "parameters", "macs"]
    head += [f"test_{table.metric}", f"test_{table.metric}_std"]
    rows = [
        [g.name, *(g.settings.get(key) for key in keys), g.metric, g.spread, g.seeds, g.runs]
        + [
            g.images_per_second,
            g.memory_mib,
            g.parameters,
            g.macs,
            mean(g.tests),
            deviation(g.tests),
        ]
        for g in table.groups
    ]
    return to_csv([head, *rows])


def runs_csv(table: Table) -> str:
    """Format the results as CSV, one row per run, including unfinished runs. The row of a failed
    run has the reason."""
    keys = [key for key in table.keys if key != "SEED"]
    head = ["name", "group", *keys, "seed", "state", "step", table.metric, f"best_{table.metric}"]
    head += ["images_per_second", "memory_mib", "seconds", "reason"]
    head += [f"test_{table.metric}"]
    rows = [
        [r.name, r.group, *(r.settings.get(key) for key in keys), r.seed, r.state, r.step, r.metric]
        + [r.best, r.images_per_second, r.memory_mib, r.seconds, r.reason, r.test]
        for r in table.runs
    ]
    return to_csv([head, *rows])


def to_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as CSV text. None becomes an empty cell."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def summary_cells(table: Table) -> list[list[str]]:
    """Format the results as rows of text: the column titles, then a row per group of runs that
    differ only in their seed."""
    unit = f" ({table.unit})" if table.unit else ""
    tested, form = any(g.tests for g in table.groups), digits_for(table.unit)
    titles = ["", f"{table.label}{unit}", *["test"] * tested, "seeds", "images/s", "memory (MiB)"]
    rows = [[*titles, "parameters", "MACs"]]
    for g in table.groups:
        rows.append([
            g.name, with_spread(g.metric, g.spread, form),
            *[with_spread(mean(g.tests), deviation(g.tests), form)] * tested,
            str(g.seeds) if g.seeds == g.runs else f"{g.seeds} of {g.runs}",
            number(g.images_per_second, ".1f"), number(g.memory_mib, ",.0f"),
            "-" if g.parameters is None else short(g.parameters),
            "-" if g.macs is None else short(g.macs),
        ])  # fmt: skip
    return rows


def with_spread(value: float | None, spread: float | None, form: str) -> str:
    """Format a mean with its standard deviation, such as "81.25 ± 0.40" for `form` ".2f". Returns
    "-" if the mean is None."""
    return number(value, form) + ("" if spread is None else f" ± {spread:{form}}")


def number(value: float | None, form: str) -> str:
    """Format a number. form: format specification, such as ".1f". Returns "-" for None."""
    return "-" if value is None else f"{value:{form}}"


def markdown(table: Table, plots: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Format a Markdown page with the results of a sweep.

    The page has a table of the groups of runs that differ only in their seed, a table of unfinished
    runs, the plots and the notes. plots: paths of images, relative to the page. notes: paragraphs
    of text.
    """
    head, *rows = summary_cells(table)
    lines = [f"# {escape(table.title)}", "", *table_lines([head, ["---"] * len(head), *rows])]
    open_runs = [run for run in table.runs if run.state != "finished"]
    if open_runs:
        cells = [[run.name, run.state, str(run.step), run.reason] for run in open_runs]
        head = ["not finished", "state", "step", "reason"]
        lines += ["", *table_lines([head, ["---"] * 4, *cells])]
    for plot in plots:
        lines += ["", f"![{table.label}]({plot})"]
    for note in notes:
        lines += ["", escape(note)]
    return "\n".join([*lines, ""])


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines of a Markdown table. The second row must consist of dashes,
    which separate the header from the other rows."""
    return [f"| {' | '.join(map(escape, row))} |" for row in rows]


def escape(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
