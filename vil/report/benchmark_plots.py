"""Plot time and memory of attention against the size of the feature map, from benchmark rows.

There is one plot per dtype, window size and number of heads. Each pair of a mask (shape of the
attention window) and a mode (chunks of tokens that the window covers) has two panels, time and
memory, as in Vision Longformer (arXiv:2103.15358). The lower bound (matmuls alone) is dashed.
Dotted lines show linear and quadratic growth.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

FLOOR = "floor"
# {backend: (color, marker)}; color-blind readers can distinguish the colors
STYLES = {
    "blocked": ("#0072B2", "o"),
    "chunk_handgrad": ("#D55E00", "s"),
    "chunk_autograd": ("#E69F00", "D"),
    "gathered": ("#009E73", "^"),
    "masked": ("#CC79A7", "v"),
    "flex": ("#56B4E9", "P"),
    "triton": ("#6A3D9A", "X"),
    "unfold_nnf": ("#8C6D31", "<"),
    "unfold_tensor": ("#BCA136", ">"),
    "sdpa": ("#4D4D4D", "d"),
    "sdpa_masked": ("#8C8C8C", "X"),
    "natten": ("#A50F15", "h"),
    FLOOR: ("#000000", ""),
}
OTHERS = ("#1B9E77", "#7570B3", "#E7298A", "#66A61E", "#A6761D", "#1F78B4", "#B2DF8A", "#FB9A99")
MARKS = ("*", "p", "8", "H")
MASKS = {
    "exact": "exact window",
    "chunks": "nine chunks, cut at the border",
    "cyclic": "nine chunks, wrapped",
}
LABELS = {
    "sdpa": "sdpa (full attention)",
    "sdpa_masked": "sdpa under the mask",
    FLOOR: "lower bound: GEMMs only",
}
INK, GUIDE = "#222222", "#9a9a9a"
TEXT = {"fontsize": 9, "color": INK}


def draw(rows: Sequence[dict], machine: dict, folder: str | Path) -> list[Path]:
    """Write a plot per dtype, window size and number of heads to a folder, and return the files.

    rows: dicts that `vil.bench.attention.plain` returned. Rows without results are ignored.
    machine: dict that describes the machine, for the titles.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["forward_ms"] is not None:
            groups.setdefault((row["dtype"], row["window"], row["heads"]), []).append(row)
    files = []
    for (dtype, window, heads), members in groups.items():
        file = Path(folder) / f"attention-{dtype}-w{window}-n{heads}.png"
        plot_rows(members, machine).savefig(file, dpi=200)
        files.append(file)
    return files


def plot_rows(rows: Sequence[dict], machine: dict) -> Figure:
    """Plot benchmark rows in one figure, with a time panel and a memory panel for each pair of mask
    and mode (see `describe_case`). machine: dict that describes the machine, for the title."""
    cases = list(dict.fromkeys((row["mask"], row["mode"]) for row in rows))
    figure = Figure(figsize=(8.4, 1.5 + 3.1 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 2, squeeze=False, sharex=True)
    lines: dict = {}
    for case, (time, memory) in zip(cases, panels):
        members = [row for row in rows if (row["mask"], row["mode"]) == case]
        lines |= curves(time, members, lambda row: row["forward_ms"] + row["backward_ms"])
        lines |= curves(memory, members, lambda row: row["extra_mib"])
        time.set_ylabel("forward + backward (ms)", **TEXT)
        memory.set_ylabel("memory beyond inputs and outputs (MiB)", **TEXT)
        time.set_title(describe_case(*case), loc="left", fontsize=9, color=INK)
    for axes in panels[-1]:
        axes.set_xlabel("feature map (tokens)", **TEXT)
    figure.suptitle(title(rows[0], machine), fontsize=10, color=INK)
    names = sorted(lines, key=sort_key)
    figure.legend(
        [lines[name] for name in names],
        [LABELS.get(name, name) for name in names],
        loc="outside lower center",
        ncols=min(4, len(names)),
        fontsize=8.5,
        frameon=False,
    )
    return figure


def curves(axes: Axes, rows: Sequence[dict], value) -> dict:
    """Plot a panel: one line per backend, and lines that show linear and quadratic growth.

    value: function that returns the number to plot for a benchmark row. Rows with None or 0 are
    omitted. Returns {backend: its line}.
    """
    points: dict[str, dict[int, float]] = {}
    grids = {}
    for row in rows:
        tokens = row["grid"][0] * row["grid"][1]
        grids[tokens] = "{}×{}".format(*row["grid"])
        if value(row):  # None and 0 have no place on a logarithmic axis
            points.setdefault(row["backend"], {})[tokens] = value(row)
    axes.set(xscale="log", yscale="log")
    lines = {}
    for name in sorted(points, key=sort_key):
        color, mark = style(name)
        dashes = "--" if name == FLOOR else "-." if "+" in name else "-"
        xs, ys = zip(*sorted(points[name].items()))
        look = {"color": color, "marker": mark, "linestyle": dashes}
        (lines[name],) = axes.plot(xs, ys, linewidth=1.6, markersize=4.5, zorder=3, **look)
    if points and len(grids) > 1:
        guides(axes, sorted(grids), points)
    format_axes(axes, grids)
    return lines


def guides(axes: Axes, tokens: list[int], points: dict[str, dict[int, float]]) -> None:
    """Draw two dotted lines with the slopes of linear and quadratic growth, below the lines of the
    backends. tokens: numbers of tokens, ascending. points: {backend: {number of tokens: value}}."""
    limits = axes.get_ylim()
    start = min(value for line in points.values() for value in line.values()) / 2.2
    grown = tokens[-1] / tokens[0]
    for power, text in ((1, "linear"), (2, "quadratic")):
        end = start * grown**power
        axes.plot([tokens[0], tokens[-1]], [start, end], ":", color=GUIDE, linewidth=1, zorder=1)
        place = min(grown, (limits[1] / start) ** (1 / power)) ** 0.36  # within the panel
        axes.annotate(
            text,
            (tokens[0] * place, start * place**power),
            ha="center",
            va="center",
            fontsize=7.5,
            color="#777777",
            style="italic",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            zorder=2,
        )
    axes.set_ylim(start / 1.4, limits[1])


def format_axes(axes: Axes, grids: dict[int, str]) -> None:
    """Set a tick at each measured size of the feature map, format numbers without exponents, and
    draw light lines at the ticks. grids: {number of tokens: label of the tick}."""
    axes.set_xticks(sorted(grids), [grids[tokens] for tokens in sorted(grids)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8, colors=INK, labelbottom=True)
    axes.grid(which="major", color="#e2e2e2", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def style(name: str) -> tuple[str, str]:
    """Return the color and marker of a backend.

    If the name is a pair "forward+backward" of two backends, returns the color of the first backend
    and the marker of the second.
    """
    if name in STYLES:
        return STYLES[name]
    forward, joined, backward = name.partition("+")
    if joined:
        return style(forward)[0], style(backward)[1]
    number = zlib.crc32(name.encode())
    return OTHERS[number % len(OTHERS)], MARKS[number // len(OTHERS) % len(MARKS)]


def sort_key(name: str) -> tuple[bool, int, str]:
    """Return the key by which the curves of a plot are sorted: first the backends in STYLES, in its
    order, then other backends by name, and last FLOOR, the lower bound on the time."""
    known = list(STYLES)
    return name == FLOOR, known.index(name) if name in known else len(known), name


def describe_case(mask: str, mode: int | None) -> str:
    """Return a panel's title, which describes the tokens that a query attends to.

    mask: a key of MASKS, or the text of an attention pattern.
    mode: which chunks of tokens the query attends to. It is ignored for an attention pattern.
        0: its own chunk and the eight neighbors
        -1: only its own chunk
        1 to 8: its own chunk and one neighbor
        None: a set of chunks that no other mode describes
    """
    if mask not in MASKS:
        return f"pattern {mask}"
    if mode == 0:
        return MASKS[mask]
    ways = {None: "chosen chunks", -1: "self chunk"}
    return f"{ways.get(mode, f'self chunk and neighbor {mode}')}, {mask}"


def title(row: dict, machine: dict) -> str:
    """Return the title of a figure: the machine, the dtype, and the settings that all panels share.
    row: any benchmark row in the figure. machine: dict that describes the machine."""
    threads = f", {plural(machine['threads'], 'thread')}" if row["device"] == "cpu" else ""
    return (
        f"Local attention on {machine['name']}{threads}, {row['dtype']}\n"
        f"window {row['window']}, {plural(row['heads'], 'head')} of {row['head_dim']}, "
        f"batch {row['batch']}, {plural(row['num_global'], 'global token')}, "
        f"{'with' if row['bias'] else 'no'} position bias"
    )


def plural(count: int, noun: str) -> str:
    """Format a count with a noun, such as "1 head" or "3 heads"."""
    return f"{count} {noun}{'s' * (count != 1)}"
