"""Compute the SVG coordinates of the line charts in a run's report. The template draws them."""

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 392, 8, 206  # edges of the plot area
MAX_POINTS, MAX_DOTS = 300, 60
NUM_COLORS, MAX_CURVES = 6, 12

Points = list[tuple[float, float]]


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

    description: text alternative for the chart. rows: (y, label) of each tick of the value axis.
    columns: (x, label) of each tick of the epoch axis. left, right: edges of the plot area.
    """

    title: str
    description: str
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    curves: list[Curve]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT


def make_chart(curves: dict[str, Points], title: str, label: str, thin: str = "train") -> Chart:
    """Compute the positions of lines, dots and ticks of a chart.

    curves: {name: list of (epoch, value)}, each with at least one point. label: name of the plotted
    quantity. thin: beginning of the names of noisy curves, which are drawn as thin lines without
    dots.
    """
    curves = {name: downsample(points) for name, points in list(curves.items())[:MAX_CURVES]}
    epochs, values = zip(*(point for points in curves.values() for point in points))
    x_range, y_range = _widen(0.0, max(epochs), 0.0), _widen(min(values), max(values), 0.05)

    def scale_x(x: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (x - x_range[0]) / (x_range[1] - x_range[0]), 1)

    def scale_y(y: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (y - y_range[0]) / (y_range[1] - y_range[0]), 1)

    drawn = []
    for i, (name, points) in enumerate(curves.items()):
        style = "thin" if name.startswith(thin) else "dashed" if i >= 2 else "solid"
        scaled = [(scale_x(x), scale_y(y)) for x, y in points]
        dots = (
            [(*at, f"{name}, epoch {x:g}: {y:.5g}") for at, (x, y) in zip(scaled, points)]
            if style != "thin" and len(points) <= MAX_DOTS
            else []
        )
        line = " ".join(f"{x},{y}" for x, y in scaled)
        drawn.append(Curve(name, style, i % NUM_COLORS, line, dots))
    ranges = "; ".join(
        f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in curves.items()
    )
    return Chart(
        title,
        f"{label} against epochs: {ranges}",
        _ticks(y_range, scale_y, ".6g"),
        _ticks(x_range, scale_x, "g"),
        drawn,
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
    length. If `high` is not above `low`, it is first set to low + abs(low), or to 1 if low is 0."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(
    limits: tuple[float, float], scale: Callable[[float], float], format: str
) -> list[tuple[float, str]]:
    values = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(*limits)
    values = [0.0 if abs(v) < 1e-15 else float(v) for v in values if limits[0] <= v <= limits[1]]
    return [(scale(value), f"{value:{format}}") for value in values]
