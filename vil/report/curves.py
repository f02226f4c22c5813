"""Learning curves of a run as pictures, drawn from its metrics.jsonl: no server, no dependency.

plots/loss.png, plots/accuracy.png and plots/lr.png, training and test sets in the same picture; of
a detector plots/precision.png and plots/losses.png. A figure that the run never logged has no
picture.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from vil.report.run_record import metrics

# picture -> (label of its y axis, the figures in it)
PICTURES = {
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
TRAIN = "train"
log = logging.getLogger(__name__)


def draw(folder: Path) -> list[Path]:
    """Draw what the run in `folder` has logged so far; returns the files written. What cannot be
    written is only told of: pictures can be drawn later."""
    series = read_series(Path(folder) / "metrics.jsonl")
    plots, written = Path(folder) / "plots", []
    try:
        plots.mkdir(exist_ok=True)
        for picture, (label, figures) in PICTURES.items():
            curves = {key: points for key, points in series.items() if key[1] in figures}
            if curves:
                chart(curves, label).savefig(plots / f"{picture}.png", dpi=120)
                written.append(plots / f"{picture}.png")
    except OSError as error:
        log.warning("no pictures in %s: %s", plots, error.strerror or error)
    return written


def read_series(file: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(split, figure) -> [(epoch, value), ..]."""
    return series_of(metrics(file))


def series_of(points: Iterable[dict]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Those of lines that are read already."""
    series = defaultdict(list)
    for point in points:
        for _, figures in PICTURES.values():
            for figure in figures:
                if figure in point:
                    series[point["split"], figure].append((point["epoch"], point[figure]))
    return series


def chart(curves: dict[tuple[str, str], list[tuple[float, float]]], label: str) -> Figure:
    """One picture: training thin, since it is noisy; test sets with a mark per evaluation."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=label)
    for (split, name), points in curves.items():
        style = {"linewidth": 1} if split == TRAIN else {"linewidth": 2, "marker": "o"}
        text = split if len({figure for _, figure in curves}) == 1 else f"{split} {name}"
        axes.plot(*zip(*points), label=text, markersize=3, **style)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1:
        axes.legend()
    return figure
