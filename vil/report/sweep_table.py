"""Table of the results of a sweep: Markdown, which is readable as plain text too, and CSV.

A group consists of the runs that differ only in their seed or in their fold of a cross-validation.
The summary has a row for each group, with the mean and the standard deviation of the metric over
the runs, and their number.
"""

import csv
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vil.report.page import short
from vil.utils.metric_format import digits_for

REPEATED = ("SEED", "DATA.FOLD")  # config keys in which the runs of a group may differ
REASON = 120  # characters of a reason in the text; runs.csv has all


class RunRow(NamedTuple):
    """Results of one run of a sweep. Numbers are None if they are NaN or not logged yet."""

    name: str
    group: str
    settings: Mapping[str, Any]  # {config key that differs between groups: value}
    seed: int
    state: str  # "pending", "running", "interrupted" (can resume), "failed" or "finished"
    step: int = 0  # number of finished training steps
    code: int | None = None  # exit code that the run recorded
    reason: str = ""  # why the run failed or was interrupted
    metric: float | None = None  # at the last evaluation
    best: float | None = None  # best value over all evaluations
    test: float | None = None  # of the best checkpoint on DATA.TEST, if DATA.VAL is set
    images_per_second: float | None = None  # median training speed
    memory_mib: float | None = None  # peak memory, see `vil.engine.logger.memory_mb`
    seconds: float | None = None  # time of all training steps
    fold: int | None = None  # DATA.FOLD of a cross-validation


class GroupRow(NamedTuple):
    """Means over the finished runs of a group, without those whose metric is NaN. Numbers are None
    if they are unknown."""

    name: str
    settings: Mapping[str, Any]
    metric: float | None
    spread: float | None  # sample standard deviation of the metric
    values: list[float]  # metric of each finished run
    test: float | None
    test_spread: float | None
    tests: list[float]  # metric in the final test of each finished run that has one
    finished: int  # number of runs in the means
    runs: int  # number of all runs
    images_per_second: float | None
    memory_mib: float | None
    parameters: int | None  # of the model
    macs: int | None  # multiply-accumulates of the model for one image


def summarize(runs: Sequence[RunRow], parameters: int | None, macs: int | None) -> GroupRow:
    """Compute the mean results of a group of runs. parameters, macs: see `GroupRow`."""
    finished = [run for run in runs if run.state == "finished" and run.metric is not None]

    def known(field: str) -> list[float]:
        return [value for run in finished if (value := getattr(run, field)) is not None]

    def mean(field: str) -> float | None:
        return statistics.fmean(known(field)) if known(field) else None

    def spread(field: str) -> float | None:
        return statistics.stdev(known(field)) if len(known(field)) > 1 else None

    return GroupRow(
        name=runs[0].group,
        settings=runs[0].settings,
        metric=mean("metric"),
        spread=spread("metric"),
        values=known("metric"),
        test=mean("test"),
        test_spread=spread("test"),
        tests=known("test"),
        finished=len(finished),
        runs=len(runs),
        images_per_second=mean("images_per_second"),
        memory_mib=mean("memory_mib"),
        parameters=parameters,
        macs=macs,
    )


def format_table(groups: Sequence[GroupRow], runs: Sequence[RunRow], title: str, unit: str) -> str:
    """Format the groups, and then the unfinished runs, as Markdown tables.

    title, unit: name and unit of the metric by which the runs are compared.
    """
    form, has_tests = digits_for(unit), any(group.tests for group in groups)
    rows, unfinished = [], []
    for group in groups:
        is_complete = group.finished == group.runs
        test = {"test": number(group.test, form, group.test_spread)} if has_tests else {}
        rows.append({
            "": group.name,
            f"{title} ({unit})" if unit else title: number(group.metric, form, group.spread),
            **test,
            "runs": group.runs if is_complete else f"{group.finished} of {group.runs}",
            "images/s": number(group.images_per_second, ".1f"),
            "memory (MiB)": number(group.memory_mib, ",.0f"),
            "parameters": "-" if group.parameters is None else short(group.parameters),
            "MACs": "-" if group.macs is None else short(group.macs),
        })  # fmt: skip
    for run in runs:
        if run.state != "finished":
            reason = textwrap.shorten(run.reason, REASON)
            unfinished.append(
                {"not finished": run.name, "state": run.state, "step": run.step, "reason": reason}
            )
    return "\n".join(markdown_table(table) for table in (rows, unfinished) if table)


def number(value: float | None, form: str, spread: float | None = None) -> str:
    """Format a number and its standard deviation, such as "81.25 ± 0.40" for the format
    specification ".2f". Returns "-" for None."""
    text = "-" if value is None else f"{value:{form}}"
    return text if spread is None else f"{text} ± {spread:{form}}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows, as {title of the column: value}, as a Markdown table with aligned columns."""
    table = Table(*rows[0], box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(Text(str(cell).replace("|", "\\|")) for cell in row.values()))
    stream = io.StringIO()
    Console(file=stream, width=10_000, color_system=None).print(table)
    return "\n".join(filter(None, map(str.strip, stream.getvalue().splitlines()))) + "\n"


def to_csv(rows: Sequence[RunRow | GroupRow], metric: str) -> str:
    """Format rows as CSV, with unrounded numbers. None becomes an empty cell. metric: name of the
    metric, for the titles of its columns."""
    titles = {"metric": metric, "spread": f"{metric}_std", "best": f"best_{metric}"}
    titles |= {"test": f"test_{metric}", "test_spread": f"test_{metric}_std"}
    omitted, lines = ("settings", "code", "values", "tests"), []
    for row in rows:
        cells = {k: v for k, v in row._asdict().items() if k not in omitted}
        lines.append({titles.get(k, k): v for k, v in cells.items()} | row.settings)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()
