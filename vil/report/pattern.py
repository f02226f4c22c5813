"""Draw attention patterns: the tokens of a grid that a query token attends to.

Shapes: X Y grid of tokens.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

UNSEEN, SEEN, TWICE, QUERY = range(4)
MEANINGS = ("not attended", "attended", "attended more than once", "the query")
COLORS = ListedColormap(["#f2f2f2", "#9ecae1", "#4292c6", "#08306b"])
FINEST = 64  # most tokens of a side with lines between tokens


def seen_from(
    attended: Iterable[tuple[int, int]], grid: tuple[int, int], token: tuple[int, int]
) -> np.ndarray:
    """Return which tokens a query attends to, as an array (X, Y) of UNSEEN, SEEN, TWICE and QUERY.

    attended: (row, column) of each key. TWICE marks keys that occur more than once. grid: (X, Y).
    token: (row, column) of the query.
    """
    counts = np.zeros(grid, dtype=int)
    for key in attended:
        counts[key] += 1
    pattern = counts.clip(max=TWICE)
    pattern[token] = QUERY
    return pattern


def draw_patterns(panels: list[tuple[str, np.ndarray, int]], path: str | Path) -> None:
    """Draw attention patterns as panels, four in a row, and write the figure to the file `path`.

    panels: (title, array (X, Y) from `seen_from`, side of a chunk in tokens). Dark lines separate
    the chunks. Raises OSError if the file cannot be written.
    """
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    x, y = panels[0][1].shape
    height = min(max(3.1 * x / y, 1.2), 9) + 0.62
    figure = Figure(figsize=(3.1 * columns, height * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, pattern, size) in zip(grid, panels):
        _draw(axes, pattern, size)
        axes.set_title(title, fontsize=9.5, linespacing=1.4)
    used = sorted({int(value) for _, pattern, _ in panels for value in np.unique(pattern)})
    marks = [Patch(facecolor=COLORS(v), edgecolor="#bbbbbb", label=MEANINGS[v]) for v in used]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.1)


def _draw(axes: Axes, pattern: np.ndarray, size: int) -> None:
    """Draw an array from `seen_from` with dark lines between chunks of `size` x `size` tokens and,
    if the grid has at most FINEST tokens per side, white lines between tokens."""
    x, y = pattern.shape
    axes.imshow(pattern, cmap=COLORS, vmin=UNSEEN, vmax=QUERY, interpolation="nearest")
    is_fine = max(x, y) <= FINEST
    lines = [(1, {"color": "white", "linewidth": 0.6})] if is_fine else []
    lines.append((size, {"color": "#555", "linewidth": 1.0 if is_fine else 0.4}))
    for step, style in lines:
        axes.hlines(np.array([*range(0, x, step), x]) - 0.5, -0.5, y - 0.5, **style)
        axes.vlines(np.array([*range(0, y, step), y]) - 0.5, -0.5, x - 0.5, **style)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.set_anchor("S")  # beside the legend; the space above is cut off
    axes.margins(0)
