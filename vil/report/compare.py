"""Render a comparison of several runs of the same task as one self-contained HTML page.

The page shows the results of each run, with the best one marked, their mean and standard deviation
if the runs differ only in their seed or fold, the settings that differ, and the curves of all runs.
This file prepares the data for the template compare.html.j2.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vil.report.charts import MAX_CURVES, Chart, make_chart
from vil.report.curves import LOSS, LR, Points, collect, plot_of
from vil.report.html import render_template
from vil.report.page import MAX_SETS, ModelCost, format_duration, short
from vil.report.run_record import RunRecord
from vil.report.sweep_table import REPEATED, number
from vil.utils.metric_format import digits_for

NOT_COMPARED = ("OUTPUT_DIR",)  # config keys that differ between any two runs


class ComparedRun(NamedTuple):
    """A run of a comparison.

    settings: {config key: value as text}. model: cost of the model, or the reason why the cost is
    unknown. epochs: configured number of epochs.
    """

    name: str
    record: RunRecord
    settings: Mapping[str, str]
    model: ModelCost | str
    epochs: float


class ComparedMetric(NamedTuple):
    """A metric of the compared runs, as in `vil.engine.loop.Metric`."""

    name: str
    label: str
    unit: str = ""
    higher_is_better: bool = True


class Cell(NamedTuple):
    """Table cell with a value of a run. is_best: whether no other run has a better value."""

    text: str
    is_best: bool = False


class RunTable(NamedTuple):
    """Table with a row for each run, in the order of the runs.

    means: for each column, the mean and the standard deviation over the runs as text, or "".
    """

    caption: str
    columns: list[str]
    rows: list[Sequence[Cell]]
    means: list[str]


def render_comparison(
    runs: Sequence[ComparedRun],
    metric: ComparedMetric,
    metrics: Sequence[ComparedMetric],
    *,
    notes: Sequence[str] = (),
    made: str,
) -> str:
    """Render the comparison of several runs as the text of one HTML file.

    metric: the metric by which the runs are compared. metrics: all metrics of the runs' task.
    notes: sentences about what limits the comparison. made: when the page was made, and by which
    version of vil.
    """
    settings = _different_settings(runs)
    return render_template(
        "report/compare.html.j2",
        runs=runs,
        are_repetitions=settings.keys() <= {*REPEATED},
        notes=notes,
        made=made,
        results=_results_table(runs, metric),
        evaluations=_evaluation_tables(runs, metrics),
        settings=settings,
        charts=_make_charts(runs, metric),
    )


def _results_table(runs: Sequence[ComparedRun], metric: ComparedMetric) -> RunTable:
    """Return the table with the state, the metric, the duration and the cost of each run. The
    metric is that on the run's first evaluated set and, in the final test, first test set."""
    better = max if metric.higher_is_better else min
    logged, tests = (
        [next(iter(run.record.evaluations(split).values()), [{}]) for run in runs]
        for split in ("val", "test")
    )
    known = [[p for p in points if metric.name in p] for points in logged]
    best = [better(points, key=lambda p: p[metric.name], default={}) for points in known]
    steps = [[p for p in run.record.points if p["split"] == "train"] for run in runs]
    last_step = [points[-1] if points else {} for points in steps]

    title = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
    measured = {
        f"best {title}": best,
        f"last {title}": [points[-1] for points in logged],
        f"test {title}": [points[-1] for points in tests],
    }
    values = {name: [p.get(metric.name) for p in points] for name, points in measured.items()}
    cells = {name: _metric_cells(each, metric) for name, each in values.items()}
    columns = {
        "state": [Cell(str(run.record.status.get("state", "unknown"))[:40]) for run in runs],
        "epochs": [
            Cell(f"{point.get('epoch', 0):g} of {run.epochs:g}")
            for run, point in zip(runs, last_step)
        ],
        f"best {title}": cells[f"best {title}"],
        "at epoch": _cells([point.get("epoch") for point in best], "{:g}".format),
        f"last {title}": cells[f"last {title}"],
        f"test {title}": cells[f"test {title}"],
        "time of all steps": [Cell(format_duration(run.record.training_seconds())) for run in runs],
        "images per second": _cells([p.get("img/s") for p in last_step], "{:,.0f}".format),
        "parameters": _cells([_cost(run, "parameters") for run in runs], "{:,}".format),
        "multiply-accumulates": _cells([_cost(run, "macs") for run in runs], short),
    }
    if not any(points[-1] for points in tests):
        del columns[f"test {title}"]
    means = [_mean(values[name], metric) if name in values else "" for name in columns]
    return RunTable("Results", list(columns), list(zip(*columns.values())), means)


def _evaluation_tables(
    runs: Sequence[ComparedRun], metrics: Sequence[ComparedMetric]
) -> list[RunTable]:
    """Return a table of each evaluated set, with all metrics of the last evaluation of each run."""
    sets = dict.fromkeys(name for run in runs for name in run.record.evaluations())
    tables = []
    for name in list(sets)[:MAX_SETS]:
        last = [(run.record.evaluations().get(name) or [{}])[-1] for run in runs]
        shown = [metric for metric in metrics if any(metric.name in point for point in last)]
        titles = [f"{m.label} ({m.unit})" if m.unit else m.label for m in shown]
        values = [[point.get(metric.name) for point in last] for metric in shown]
        columns = list(map(_metric_cells, values, shown))
        means, caption = list(map(_mean, values, shown)), f"Last evaluation on {name}"
        if shown:
            tables.append(RunTable(caption, titles, list(zip(*columns)), means))
    return tables


def _metric_cells(values: Sequence[float | None], metric: ComparedMetric) -> list[Cell]:
    """Format a metric of each run, and mark the best values."""
    known = [value for value in values if value is not None]
    best = (max if metric.higher_is_better else min)(known, default=None)
    form = digits_for(metric.unit)
    return [
        Cell("-") if value is None else Cell(f"{value:{form}}", value == best) for value in values
    ]


def _mean(values: Sequence[float | None], metric: ComparedMetric) -> str:
    """Format the mean and the standard deviation of a metric over the runs that have it."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = statistics.stdev(known) if len(known) > 1 else None
    text = number(statistics.fmean(known), digits_for(metric.unit), spread)
    return text if len(known) == len(values) else f"{text} ({len(known)} runs)"


def _cells(values: Sequence[float | None], form: Callable[[float], str]) -> list[Cell]:
    """Format a number of each run that is not rated. None becomes "-"."""
    return [Cell("-" if value is None else form(value)) for value in values]


def _cost(run: ComparedRun, name: str) -> int | None:
    return getattr(run.model, name) if isinstance(run.model, ModelCost) else None


def _different_settings(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return {config key: its value in each run} of the keys whose values differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in NOT_COMPARED)
    values = {key: [run.settings.get(key, "-") for run in runs] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def _make_charts(runs: Sequence[ComparedRun], metric: ComparedMetric) -> list[Chart]:
    """Return a chart of each metric and split, with a curve for each run. The charts show the
    metric by which the runs are compared, the loss and the learning rate; those of the training
    set come last."""
    plots = dict.fromkeys([plot_of(metric.name, metric.label, metric.unit), LOSS, LR])
    series: dict[tuple, dict[str, Points]] = {}
    for plot in plots:
        for run in runs:
            for (split, _), points in collect(run.record.points, plot.metrics).items():
                series.setdefault((split, plot), {})[run.name] = points
    drawn, charts = {run.name for run in runs[:MAX_CURVES]}, []
    for (split, plot), curves in sorted(series.items(), key=lambda item: item[0][0] == "train"):
        if (split == "train" or split.startswith("val/")) and drawn & curves.keys():
            title = plot.title if plot == LR else f"{plot.title} on {split.removeprefix('val/')}"
            all_runs = {run.name: curves.get(run.name, []) for run in runs}  # the same colors
            thin = split == "train" and plot != LR
            charts.append(make_chart(all_runs, title, plot.label, thin=lambda _, thin=thin: thin))
    return charts
