"""Curves as SVG that takes the page's colours: light, dark, on paper."""

from matplotlib.ticker import MaxNLocator

from vil.report.html import Html, element

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 34  # margins
MOST_POINTS, MOST_DOTS = 300, 60
COLOURS, MOST_CURVES = 6, 12

Points = list[tuple[float, float]]


def chart(curves: dict[str, Points], title: str, label: str, plain: str = "train") -> Html:
    """A figure of one panel. Lines of curves whose name begins with `plain` are thin and have no
    dots: they are noisy. curves: points (epoch, value) of each, one at least.
    """
    curves = {name: thinned(points) for name, points in list(curves.items())[:MOST_CURVES]}
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    x_range, y_range = widened(0.0, max(xs), 0.0), widened(min(ys), max(ys), 0.05)
    place = _placing(x_range, y_range)
    inside = _axes(x_range, y_range, place)
    styles = {name: _style(n, name.startswith(plain)) for n, name in enumerate(curves)}
    for name, points in curves.items():
        inside += _line(name, points, styles[name], place)
    spoken = f"{label} against epochs: " + "; ".join(
        f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in curves.items()
    )
    drawing = element(
        "svg", element("title", spoken), *inside, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img"
    )
    keys = [element("span", _swatch(styles[name]), name) for name in curves]
    legend = element("figcaption", *keys, class_="legend")
    return element("figure", element("h3", title), drawing, legend, class_="chart")


def thinned(points: Points) -> Points:
    """At most MOST_POINTS: means of as many neighbours as it takes, the last one as it is."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // (MOST_POINTS - 1))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [tuple(sum(axis) / len(part) for axis in zip(*part)) for part in parts]
    return [*means, points[-1]]


def widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """A range with a margin, not empty."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    return low - margin * (high - low), high + margin * (high - low)


def _placing(x_range, y_range):
    """From an epoch and a value to a place in the drawing."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[str, str]:
        right = LEFT + across * (x - x_range[0]) / (x_range[1] - x_range[0])
        down = TOP + up * (1 - (y - y_range[0]) / (y_range[1] - y_range[0]))
        return f"{right:.1f}", f"{down:.1f}"

    return place


def _axes(x_range, y_range, place) -> list[Html]:
    found = []
    for y in _ticks(y_range):
        left, at = place(x_range[0], y)
        right, _ = place(x_range[1], y)
        found.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        beside = {"x": LEFT - 6, "y": at, "dy": ".32em", "text_anchor": "end"}
        found.append(element("text", f"{y:.6g}", **beside))
    for x in _ticks(x_range):
        at, _ = place(x, y_range[0])
        found.append(element("text", f"{x:g}", x=at, y=HEIGHT - 18, text_anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*found, element("text", "epoch", x=middle, y=HEIGHT - 3, text_anchor="middle")]


def _ticks(limits: tuple[float, float]) -> list[float]:
    found = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(*limits)
    return [0.0 if abs(x) < 1e-15 else float(x) for x in found if limits[0] <= x <= limits[1]]


def _style(number: int, thin: bool) -> dict[str, str]:
    kind = "thin" if thin else "dashed" if number >= 2 else "solid"
    return {"class_": kind, "style": f"stroke: var(--c{number % COLOURS})"}


def _line(name: str, points: Points, style: dict[str, str], place) -> list[Html]:
    """The curve; where there are few points each is a dot that tells its value when pointed at."""
    path = " ".join(",".join(place(*point)) for point in points)
    found = [element("polyline", points=path, **style)]
    if style["class_"] == "thin" or len(points) > MOST_DOTS:
        return found
    fill = style["style"].replace("stroke", "fill")
    for x, y in points:
        across, down = place(x, y)
        told = element("title", f"{name}, epoch {x:g}: {y:.5g}")
        found.append(element("circle", told, cx=across, cy=down, r=3, style=fill))
    return found


def _swatch(style: dict[str, str]) -> Html:
    line = element("polyline", points="1,5 21,5", **style)
    return element("svg", line, viewBox="0 0 22 10", aria_hidden="true")
