"""Plot a run's learning curves from its metrics.jsonl, as PNG files in its folder `plots`.

Each plot shows the training and test sets. Plots of metrics that the run did not log are omitted.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from matplotlib.figure import Figure

from vil.report.run_record import metrics
from vil.utils.plot_text import plot_text

# plot -> (label of the y axis, metrics)
PLOTS = {
    "loss": ("loss", ("loss",)),
    "accuracy": ("accuracy (%)", ("top1", "top5")),
    "precision": ("average precision (%)", ("box_ap", "box_ap50", "mask_ap", "mask_ap50")),
    "losses": (
        "parts of the loss",
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
    "lr": ("learning rate", ("lr",)),
}
Curves = dict[str, list[tuple[float, float]]]  # split, and metric if several -> (epoch, value)
log = logging.getLogger(__name__)


def draw(folder: Path) -> list[Path]:
    """Plot the learning curves that a run has logged so far. Returns the files written.

    folder: the run's folder. If the plots cannot be written, a warning is logged.
    """
    groups = list(group_curves(metrics(Path(folder) / "metrics.jsonl")))
    plots, files = Path(folder) / "plots", []
    try:
        plots.mkdir(exist_ok=True)
        for plot, label, curves in groups:
            plot_curves(curves, label).savefig(plots / f"{plot}.png", dpi=120)
            files.append(plots / f"{plot}.png")
    except OSError as error:
        log.warning("cannot write plots to %s: %s", plots, error.strerror or error)
    return files


def group_curves(points: Iterable[dict]) -> Iterator[tuple[str, str, Curves]]:
    """Group logged metrics by plot, as PLOTS defines. points: lines of metrics.jsonl, as dicts.

    Yields (name of the plot, label of the value axis, {curve: [(epoch, value), ...]}) for each plot
    that has at least one value.
    """
    points = list(points)
    for plot, (label, names) in PLOTS.items():
        series = defaultdict(list)
        for point in points:
            for name in (name for name in names if name in point):
                series[point["split"], name].append((point["epoch"], point[name]))
        is_single = len({name for _, name in series}) == 1
        if series:
            curves = {split if is_single else f"{split} {n}": v for (split, n), v in series.items()}
            yield plot, label, curves


def plot_curves(curves: Curves, label: str) -> Figure:
    """Plot learning curves in one figure. The noisy curve of the training set is a thin line, and
    the curves of test sets have markers. label: label of the value axis."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=plot_text(label))
    for name, points in curves.items():
        is_training = name.split(" ")[0] == "train"
        style = {"linewidth": 1} if is_training else {"linewidth": 2, "marker": "o"}
        axes.plot(*zip(*points), label=plot_text(name), markersize=3, **style)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1:
        axes.legend()
    return figure
