"""Pictures of the attention pattern: which tokens a query sees, for each mask and mode.

Letters: X Y grid of tokens.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

UNSEEN, SEEN, TWICE, QUERY = range(4)
MEANINGS = ("not seen", "seen", "seen more than once", "the token")
COLOURS = ListedColormap(["#f2f2f2", "#9ecae1", "#4292c6", "#08306b"])
FINEST = 64  # tokens along a side whose borders are still drawn


def seen_from(
    met: Iterable[tuple[int, int]], grid: tuple[int, int], token: tuple[int, int]
) -> np.ndarray:
    """The (row, column) of each key that a token meets, one that it meets twice twice -> (X, Y):
    the number of the meaning of each token of the grid.
    """
    counts = np.zeros(grid, dtype=int)
    for place in met:
        counts[place] += 1
    picture = counts.clip(max=TWICE)
    picture[token] = QUERY
    return picture


def draw_patterns(panels: list[tuple[str, np.ndarray, int]], path: str | Path) -> None:
    """One panel each, four in a row: its title, its picture (X, Y) from `seen_from`, and the side
    of its chunks, drawn as lines. OSError for a path that cannot be written.
    """
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    x, y = panels[0][1].shape
    high = min(max(3.1 * x / y, 1.2), 9) + 0.62
    figure = Figure(figsize=(3.1 * columns, high * rows + 0.4), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, picture, size) in zip(places, panels):
        _draw(axes, picture, size)
        axes.set_title(title, fontsize=9.5, linespacing=1.4)
    found = sorted({int(value) for _, picture, _ in panels for value in np.unique(picture)})
    marks = [Patch(facecolor=COLOURS(v), edgecolor="#bbbbbb", label=MEANINGS[v]) for v in found]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, picture: np.ndarray, size: int) -> None:
    """The tokens, white lines between them and dark ones between chunks."""
    x, y = picture.shape
    axes.imshow(picture, cmap=COLOURS, vmin=UNSEEN, vmax=QUERY, interpolation="nearest")
    whole = {"xmin": -0.5, "xmax": y - 0.5}, {"ymin": -0.5, "ymax": x - 0.5}
    if max(x, y) <= FINEST:
        axes.hlines(np.arange(x + 1) - 0.5, **whole[0], color="white", linewidth=0.6)
        axes.vlines(np.arange(y + 1) - 0.5, **whole[1], color="white", linewidth=0.6)
    thick = 1.0 if max(x, y) <= FINEST else 0.4
    axes.hlines([*range(0, x, size), x] - np.array(0.5), **whole[0], color="#555", linewidth=thick)
    axes.vlines([*range(0, y, size), y] - np.array(0.5), **whole[1], color="#555", linewidth=thick)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.margins(0)
