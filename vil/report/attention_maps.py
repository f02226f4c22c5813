"""Draw attention weights over the preprocessed image.

Shapes: N heads, G global tokens, R cells, H W image size. A cell is a square of image pixels. Its
color shows the attention weight of one key.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vil.utils.plot_text import plot_text

HEAT = colormaps["inferno"]
MARK = "#00d5ff"
LUMINANCE = (0.299, 0.587, 0.114)  # weights of red, green and blue
SIDE = 1.75  # inches of a panel


class Row(NamedTuple):
    """Attention weights of one query token, drawn as a row of panels with one panel per head.

    weights (N, G+R): weights of N heads, to G global tokens and then to R cells, the squares into
    which the image is divided.
    num_global: G.
    cells: (rows, columns) of cells.
    side: side of a cell in pixels.
    square: (top, left, side) of the query token in pixels; None for a global token.
    """

    title: str
    weights: np.ndarray
    num_global: int
    cells: tuple[int, int]
    side: int
    square: tuple[int, int, int] | None = None

    def panels(self) -> list[tuple[str, np.ndarray]]:
        """Return (name, weights) for each panel. There is one panel per head. If there are several
        heads, a panel with the mean of all heads comes first. weights (G+R): attention weights of
        G global tokens and R cells."""
        heads = [(f"head {n}", weights) for n, weights in enumerate(self.weights, start=1)]
        return [("mean of heads", self.weights.mean(0)), *heads] if len(heads) > 1 else heads


def draw_attention(image: np.ndarray, rows: list[Row], title: str, path: str | Path) -> None:
    """Draw attention maps, a row per query token, and write the figure to the file `path`.

    image (H, W, 3): values from 0 to 1, drawn as the first panel of each row. Raises OSError if the
    file cannot be written.
    """
    columns = 1 + max(len(row.panels()) for row in rows)
    size = SIDE * columns + 0.4, (SIDE + 0.36) * len(rows) + 0.4
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(grid, rows):
        for axes in line:
            axes.set_axis_off()
        _draw_image(line[0], image, row)
        for axes, panel in zip(line[1:], row.panels()):
            _draw_map(axes, image, row, *panel)
    figure.suptitle(plot_text(title), fontsize=10)
    figure.savefig(path, dpi=90)


def _draw_image(axes: Axes, image: np.ndarray, row: Row) -> None:
    """Draw the image with ticks in pixels, and mark the row's query token."""
    height, width = image.shape[:2]
    axes.set_axis_on()
    axes.imshow(image, extent=(0, width, height, 0))
    axes.set_xticks([0, width // 2, width])
    axes.set_yticks([0, height // 2, height])
    axes.tick_params(labelsize=6, length=2, pad=1)
    axes.set_title(plot_text(row.title), fontsize=8)
    _mark_token(axes, row)


def _draw_map(axes: Axes, image: np.ndarray, row: Row, name: str, weights: np.ndarray) -> None:
    """Draw a panel: the attention weights as a heat map over the darkened image.

    Cells with weight 0 have no color. name: first part of the panel's caption. weights (G+R):
    attention weights of G global tokens and R cells.
    """
    height, width = image.shape[:2]
    grey = 0.55 * (image @ np.array(LUMINANCE))
    axes.imshow(grey, extent=(0, width, height, 0), cmap="gray", vmin=0, vmax=1)
    local = weights[row.num_global :].reshape(row.cells)
    peak = local.max(initial=0.0)
    share = local / peak if peak > 0 else local
    heat = HEAT(share)
    heat[..., 3] = np.where(local > 0, 0.6 + 0.3 * share, 0.0)
    rows, columns = row.cells
    extent = (0, columns * row.side, rows * row.side, 0)
    axes.imshow(heat, extent=extent, interpolation="nearest")
    axes.set(xlim=(0, width), ylim=(height, 0))
    caption = f"{name}\nhighest {100 * peak:.3g}%"
    if row.num_global:
        caption += f", to globals {weights[: row.num_global].sum():.0%}"
    axes.set_title(caption, fontsize=7)
    _mark_token(axes, row)


def _mark_token(axes: Axes, row: Row) -> None:
    if row.square:
        top, left, side = row.square
        box = Rectangle((left, top), side, side, fill=False, edgecolor=MARK, linewidth=1.2)
        axes.add_patch(box)
