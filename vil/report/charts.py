"""Compute the SVG coordinates of the line charts in reports. The macro `draw_chart` draws them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from vil.report.curves import Points, is_training

WIDTH, HEIGHT = 400, 250
TOP, BOTTOM = 24, 206  # edges of the plot area, below the name of the value axis
CHARACTER = 7.2  # width of a character of a tick label
MAX_POINTS, MAX_DOTS = 300, 60
NUM_COLORS, MAX_CURVES = 6, 12


class Curve(NamedTuple):
    """Line of a chart, in SVG coordinates.

    style: "solid", "dashed" or "thin". color: number of the line's CSS color, such as 2 for
    var(--c2). line: points of the line as "x,y" pairs, separated by spaces. dots: (x, y, label) of
    each dot.
    """

    name: str
    style: str
    color: int
    line: str
    dots: list[tuple[float, float, str]]


class Chart(NamedTuple):
    """Line chart in SVG coordinates.

    label, across: names and units of the value axis and of the horizontal axis. description: text
    alternative for the chart. rows: (y, label) of each tick of the value axis. columns: (x, label)
    of each tick of the horizontal axis. left, right: edges of the plot area. omitted: number of
    curves that are not drawn, because there are more than MAX_CURVES.
    """

    title: str
    label: str
    description: str
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    curves: list[Curve]
    left: float
    right: float
    omitted: int = 0
    across: str = "epoch"
    width: int = WIDTH
    height: int = HEIGHT


def make_chart(
    curves: Mapping[str, Points],
    title: str,
    label: str,
    thin: Callable[[str], bool] = is_training,
    across: str = "epoch",
) -> Chart:
    """Compute the positions of lines, dots and ticks of a chart.

    curves: {name: list of (epoch, value)}. A curve without points is not drawn, but has a color.
    label: name and unit of the plotted quantity. thin: whether the curve of a name is noisy, and is
    drawn as a thin line without dots. across: name and unit of a quantity instead of the epoch.
    """
    omitted = max(len(curves) - MAX_CURVES, 0)
    curves = {name: downsample(points) for name, points in list(curves.items())[:MAX_CURVES]}
    epochs, values = zip(*(point for points in curves.values() for point in points))
    x_range, y_range = _widen(0.0, max(epochs), 0.0), _widen(min(values), max(values), 0.05)
    x_ticks, y_ticks = _ticks(x_range, "g"), _ticks(y_range, ".12g")
    left = 14 + CHARACTER * max((len(text) for _, text in y_ticks), default=0)
    right = WIDTH - 6 - CHARACTER / 2 * len(x_ticks[-1][1])

    def scale_x(x: float) -> float:
        return round(left + (right - left) * (x - x_range[0]) / (x_range[1] - x_range[0]), 1)

    def scale_y(y: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (y - y_range[0]) / (y_range[1] - y_range[0]), 1)

    drawn = []
    for i, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        style = "thin" if thin(name) else "dashed" if i >= NUM_COLORS else "solid"
        scaled = [(scale_x(x), scale_y(y)) for x, y in points]
        dots = (
            [(*at, f"{name}, epoch {x:g}: {y:.5g}") for at, (x, y) in zip(scaled, points)]
            if len(points) == 1 or (style != "thin" and len(points) <= MAX_DOTS)
            else []
        )
        line = " ".join(f"{x},{y}" for x, y in scaled)
        drawn.append(Curve(name, style, i % NUM_COLORS, line, dots))
    ranges = "; ".join(
        f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}"
        for name, points in curves.items()
        if points
    )
    return Chart(
        title,
        label,
        f"{label} against {across}: {ranges}",
        rows=[(scale_y(value), text) for value, text in y_ticks],
        columns=[(scale_x(value), text) for value, text in x_ticks],
        curves=drawn,
        left=round(left, 1),
        right=round(right, 1),
        omitted=omitted,
        across=across,
    )


def downsample(points: Points) -> Points:
    """Reduce points to at most MAX_POINTS by averaging neighbors. MAX_POINTS or fewer points are
    returned unchanged. The last point is appended to the averages, so that the line ends there."""
    if len(points) <= MAX_POINTS:
        return points
    size = -(-len(points) // (MAX_POINTS - 1))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [tuple(sum(axis) / len(part) for axis in zip(*part)) for part in parts]
    return [*means, points[-1]]


def _widen(low: float, high: float, margin: float) -> tuple[float, float]:
    """Return the range from `low` to `high`, extended on both sides by the fraction `margin` of its
    length. If both are equal, each side is first extended by half of the value, or by 0.5 for 0."""
    if high <= low:
        half = (abs(low) or 1.0) / 2
        low, high = low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(limits: tuple[float, float], form: str) -> list[tuple[float, str]]:
    """Return (value, label) of each tick of an axis. form: format specification of the labels."""
    values = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(*limits)
    values = [0.0 if abs(v) < 1e-15 else float(v) for v in values if limits[0] <= v <= limits[1]]
    return [(value, f"{value:{form}}") for value in values]
