"""Plot a run's learning curves from its metrics.jsonl, as PNG files in its folder `plots`.

Each plot shows the training and test sets. Plots of metrics that the run did not log are omitted.
The reports of runs have the same curves, see charts.py.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from vil.report.run_record import metrics
from vil.utils.plot_text import plot_text

Points = list[tuple[float, float]]  # (epoch, value)
log = logging.getLogger(__name__)


class Plot(NamedTuple):
    """Metrics that share an axis. unit: their unit, or "" if they have none."""

    title: str
    unit: str
    metrics: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name and unit of the value axis."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def plot_of(metric: str, label: str = "", unit: str = "") -> Plot:
    """Return the plot of a single metric. label, unit: as in `vil.engine.loop.Metric`."""
    return Plot(label or metric, unit, (metric,))


LOSS = Plot("loss", "", ("loss",))
LR = Plot("learning rate", "", ("lr",))
PLOTS = {  # by the name of the file, without its ending
    "loss": LOSS,
    "accuracy": Plot("accuracy", "%", ("top1", "top5")),
    "precision": Plot("average precision", "%", ("box_ap", "box_ap50", "mask_ap", "mask_ap50")),
    "losses": Plot(
        "parts of the loss",
        "",
        (
            "loss_classifier",
            "loss_box_reg",
            "loss_mask",
            "loss_objectness",
            "loss_rpn_box_reg",
            "classification",
            "bbox_regression",
        ),
    ),
    "lr": LR,
}


def draw(folder: Path, metric: Plot | None = None) -> list[Path]:
    """Plot the learning curves that a run has logged so far. Returns the files written.

    folder: the run's folder. metric: see `group_curves`. If the plots cannot be written, a warning
    is logged.
    """
    groups = list(group_curves(metrics(Path(folder) / "metrics.jsonl"), metric))
    plots, files = Path(folder) / "plots", []
    try:
        plots.mkdir(exist_ok=True)
        for name, plot, curves in groups:
            plot_curves(curves, plot.label).savefig(plots / f"{name}.png", dpi=120)
            files.append(plots / f"{name}.png")
    except OSError as error:
        log.warning("cannot write plots to %s: %s", plots, error.strerror or error)
    return files


def group_curves(
    points: Iterable[dict], metric: Plot | None = None
) -> Iterator[tuple[str, Plot, dict[str, Points]]]:
    """Group logged metrics by plot.

    points: lines of metrics.jsonl, as dicts. metric: plot of the metric that selects the best
    checkpoint. It comes first, and is left out if a plot in PLOTS has this metric.

    Yields (name of the plot, plot, {curve: points}) for each plot that has at least one value. A
    curve is named by its split, and by its metric if the plot has several.
    """
    points, plots = list(points), PLOTS
    if metric and not any(set(metric.metrics) <= set(plot.metrics) for plot in PLOTS.values()):
        plots = {"metric": metric} | PLOTS
    for name, plot in plots.items():
        series = collect(points, plot.metrics)
        is_single = len({metric for _, metric in series}) == 1
        if series:
            curves = {split if is_single else f"{split} {m}": v for (split, m), v in series.items()}
            yield name, plot, curves


def collect(points: Iterable[dict], names: Collection[str]) -> dict[tuple[str, str], Points]:
    """Return {(split, metric): points} of the metrics in `names` that are logged. points: lines of
    metrics.jsonl, as dicts."""
    series = defaultdict(list)
    for point in points:
        for name in (name for name in names if name in point):
            series[point["split"], name].append((point["epoch"], point[name]))
    return dict(series)


def is_training(curve: str) -> bool:
    """Return whether a curve of `group_curves` is that of the training set, which is noisy."""
    return curve.split(" ")[0] == "train"


def plot_curves(curves: dict[str, Points], label: str) -> Figure:
    """Plot learning curves in one figure. The noisy curve of the training set is a thin line, and
    the curves of test sets have markers. label: label of the value axis."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=plot_text(label))
    for name, points in curves.items():
        style = {"linewidth": 1} if is_training(name) else {"linewidth": 2, "marker": "o"}
        axes.plot(*zip(*points), label=plot_text(name[:60]), markersize=3, **style)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1:
        axes.legend()
    return figure
