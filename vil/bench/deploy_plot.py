"""Plot the accuracy of models against their speed, as `vil benchmark deploy` measured it."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from vil.bench.deploy import Row
from vil.utils.atomic_write import write_aside


def plot_accuracy_and_speed(rows: Sequence[Row], batch: int, file: Path) -> bool:
    """Plot the top-1 accuracy of each model against its highest speed, in images per second.

    The published accuracy is plotted if none was measured. batch: batch size of the speeds. Returns
    False, without writing a file, if no row has both values. Raises OSError if the file cannot be
    written.
    """
    best: dict[str, Row] = {}
    for row in rows:
        speed = row.speed.get(batch)
        if speed and accuracy(row) is not None:
            known = best.get(row.model)
            if known is None or speed > known.speed[batch]:
                best[row.model] = row
    if not best:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    measured = any(row.top1 is not None for row in best.values())
    label = "top-1 (%)" if measured else "published top-1 (%), of the model in float32"
    axes = figure.add_subplot(xlabel=f"images per second, batch {batch}", ylabel=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(ScalarFormatter())
    for number, (name, row) in enumerate(best.items()):
        ours = not name.startswith("timm/")
        place = row.speed[batch], accuracy(row)
        axes.plot(*place, "o" if ours else "s", color="#0072B2" if ours else "#D55E00")
        text = f"{name.removeprefix('timm/')}\n{row.path}"
        offset = 0, (9, -9)[number % 2]
        align = dict(ha="center", va=("bottom", "top")[number % 2])
        axes.annotate(text, place, offset, textcoords="offset points", fontsize=8, **align)
    axes.margins(x=0.15, y=0.2)
    axes.grid(alpha=0.3, which="both")
    with write_aside(file) as aside:
        figure.savefig(aside, dpi=120)
    return True


def accuracy(row: Row) -> float | None:
    """Return the top-1 accuracy of a row's model in percent: the measured one or, if there is none,
    the published one. None if neither is known."""
    return row.top1 if row.top1 is not None else row.published
