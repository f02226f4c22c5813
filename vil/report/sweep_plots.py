"""Plot the results of a sweep: the metric of each group of runs, and the metric against the cost.

A group consists of the runs that differ only in their seed. The costs are training speed and
multiply-accumulates (MACs).
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from vil.report.sweep_table import GroupRow, Table
from vil.utils.atomic_write import write_aside
from vil.utils.plot_text import plot_text

INK, DOT = "#222222", "#0072B2"
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C6D31",
    "#4D4D4D", "#A50F15",
)  # fmt: skip
MARKS = "osD^vPX<>dh*"
WIDE = 10  # ratio of costs from which the axis is logarithmic
# what a group costs: (label of the axis, value, divisor)
COSTS: tuple[tuple[str, Callable[[GroupRow], float | None], float], ...] = (
    ("images per second of training", lambda group: group.images_per_second, 1.0),
    ("multiply-accumulates for one image (millions)", lambda group: group.macs, 1e6),
)


def draw(table: Table, folder: Path) -> list[Path]:
    """Plot the results of a sweep to <metric>.png and <metric>_cost.png. Returns the files written.

    Groups without a finished run are omitted. If no group has a finished run, no file is written.
    Raises OSError if a file cannot be written.
    """
    groups = [group for group in table.groups if group.metric is not None]
    if not groups:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    figures = {table.metric: plot_spread(table, groups), f"{table.metric}_cost": plot_cost(table)}
    files = []
    for name, figure in figures.items():
        if figure is not None:
            with write_aside(folder / f"{name}.png") as aside:
                figure.savefig(aside, dpi=120)
            files.append(folder / f"{name}.png")
    return files


def plot_spread(table: Table, groups: list[GroupRow]) -> Figure:
    """Plot the metric with one row per group of runs. A row shows a dot for each seed, and the mean
    with the standard deviation."""
    figure = Figure(figsize=(7, 1.2 + 0.34 * len(groups)), layout="constrained")
    axes = figure.add_subplot(xlabel=label(table))
    for y, group in enumerate(groups):
        axes.plot(group.values, [y] * len(group.values), "o", color=DOT, alpha=0.35, markersize=5)
        axes.errorbar(
            group.metric, y, xerr=group.spread, fmt="D", color=INK, capsize=4, markersize=5
        )
    axes.set_yticks(range(len(groups)), [plot_text(group.name) for group in groups])
    axes.invert_yaxis()
    axes.margins(y=0.6 / max(len(groups), 1))
    axes.grid(axis="x", alpha=0.3)
    counts = {group.seeds for group in groups}
    seeds = f"{counts.pop()}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    axes.set_title(
        f"{plot_text(table.title)}: mean, standard deviation, and {seeds} seeds", fontsize=9
    )
    return figure


def plot_cost(table: Table) -> Figure | None:
    """Plot the metric of each group of runs against the training speed, and against the MACs.

    A cost that is unknown for all groups has no panel. Returns None if both costs are unknown.
    """
    groups = [group for group in table.groups if group.metric is not None]
    known = [cost for cost in COSTS if any(cost[1](group) for group in groups)]
    if not known:
        return None
    figure = Figure(figsize=(5.2 * len(known), 4.4), layout="constrained")
    panels = figure.subplots(1, len(known), squeeze=False, sharey=True)[0]
    handles = {}  # of each group, from any panel, because one of its costs may be unknown
    for axes, (title, value_of, unit) in zip(panels, known):
        for number, group in enumerate(groups):
            if value := value_of(group):
                handles[number] = axes.errorbar(
                    value / unit, group.metric, yerr=group.spread, capsize=3,
                    label=plot_text(group.name), fmt=MARKS[number % len(MARKS)],
                    color=COLORS[number % len(COLORS)],
                )  # fmt: skip
        values = [value_of(group) for group in groups if value_of(group)]
        if max(values) > WIDE * min(values):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(label(table))
    shown = [handles[number] for number in sorted(handles)]
    figure.legend(handles=shown, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def label(table: Table) -> str:
    """Return an axis label: the label of the metric and its unit, such as "accuracy (%)"."""
    return f"{table.label} ({table.unit})" if table.unit else table.label
