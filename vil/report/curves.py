"""Plot a run's learning curves from its metrics.jsonl, as PNG files in its folder `plots`.

Each plot shows the training and test sets. Plots of metrics that the run did not log are omitted.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from vil.report.run_record import metrics

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
Series = dict[tuple[str, str], list[tuple[float, float]]]  # (split, metric) -> [(epoch, value)]
log = logging.getLogger(__name__)


def draw(folder: Path) -> list[Path]:
    """Plot what the run in `folder` has logged so far. Returns the files.

    Failures to write are logged as warnings, not raised: the plots can be drawn again later.
    """
    series = read_series(Path(folder) / "metrics.jsonl")
    plots, files = Path(folder) / "plots", []
    try:
        plots.mkdir(exist_ok=True)
        for plot, (label, names) in PLOTS.items():
            curves = {key: points for key, points in series.items() if key[1] in names}
            if curves:
                plot_curves(curves, label).savefig(plots / f"{plot}.png", dpi=120)
                files.append(plots / f"{plot}.png")
    except OSError as error:
        log.warning("no plots in %s: %s", plots, error.strerror or error)
    return files


def read_series(file: Path) -> Series:
    """Read the series of a metrics.jsonl."""
    return group_series(metrics(file))


def group_series(points: Iterable[dict]) -> Series:
    """Group logged points by split and metric."""
    series, names = defaultdict(list), [name for _, plot in PLOTS.values() for name in plot]
    for point in points:
        for name in names:
            if name in point:
                series[point["split"], name].append((point["epoch"], point[name]))
    return series


def plot_curves(curves: Series, label: str) -> Figure:
    """Plot curves: training as thin lines, since it is noisy, test sets with a mark per point."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=label)
    is_single = len({name for _, name in curves}) == 1
    for (split, name), points in curves.items():
        style = {"linewidth": 1} if split == "train" else {"linewidth": 2, "marker": "o"}
        text = split if is_single else f"{split} {name}"
        axes.plot(*zip(*points), label=text, markersize=3, **style)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1:
        axes.legend()
    return figure
