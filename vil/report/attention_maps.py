"""Pictures of attention: what a token attends to, laid over the image as the model sees it.

Letters: N heads, G global tokens, R key cells, H W image size.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

HEAT = colormaps["inferno"]
MARK = "#00d5ff"
GREY = (0.299, 0.587, 0.114)  # of red, green and blue in brightness
SIDE = 1.75  # inches of a panel


class Row(NamedTuple):
    """What one token attends to, a panel per head.

    weights (N, G+R), the global tokens first. cells: rows and columns of the R keys. side: pixels
    along a cell. square: the token's first row, first column and side in pixels; None for a global
    token, which has no place.
    """

    title: str
    weights: np.ndarray
    num_global: int
    cells: tuple[int, int]
    side: int
    square: tuple[int, int, int] | None = None


def draw_attention(image: np.ndarray, rows: list[Row], title: str, path: str | Path) -> None:
    """image (H, W, 3) in 0..1; a line of panels per row: the image, the mean of the heads, each
    head. OSError for a path that cannot be written.
    """
    columns = 1 + max(panels_of(row) for row in rows)
    figure = Figure(figsize=(SIDE * columns + 0.4, (SIDE + 0.36) * len(rows) + 0.4))
    figure.set_layout_engine("constrained")
    places = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(places, rows):
        for axes in line:
            axes.set_axis_off()
        _draw_image(line[0], image, row)
        mean = [("mean of heads", row.weights.mean(0))] if len(row.weights) > 1 else []
        heads = [(f"head {n}", weights) for n, weights in enumerate(row.weights, start=1)]
        for axes, (name, weights) in zip(line[1:], mean + heads):
            _draw_map(axes, image, row, name, weights)
    figure.suptitle(plain(title), fontsize=10, parse_math=False)
    figure.savefig(path, dpi=90)


def panels_of(row: Row) -> int:
    """The maps of a row: a mean where there are several heads, and the heads."""
    return len(row.weights) + (len(row.weights) > 1)


def plain(text: str) -> str:
    """Text that any font and format takes: bytes of names that are not UTF-8 are spelled out."""
    whole = text.encode("utf-8", "backslashreplace").decode()
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in whole)


def _draw_image(axes: Axes, image: np.ndarray, row: Row) -> None:
    """The image itself, with ticks to read pixels off."""
    height, width = image.shape[:2]
    axes.set_axis_on()
    axes.imshow(image, extent=(0, width, height, 0))
    axes.set_xticks([0, width // 2, width])
    axes.set_yticks([0, height // 2, height])
    axes.tick_params(labelsize=6, length=2, pad=1)
    axes.set_title(row.title, fontsize=8, parse_math=False)
    _mark(axes, row)


def _draw_map(axes: Axes, image: np.ndarray, row: Row, name: str, weights: np.ndarray) -> None:
    """One head's weights over the darkened image; cells that are not seen stay dark."""
    height, width = image.shape[:2]
    grey = image @ np.array(GREY)
    axes.imshow(0.55 * grey, extent=(0, width, height, 0), cmap="gray", vmin=0, vmax=1)
    local = weights[row.num_global :].reshape(row.cells)
    peak = local.max(initial=0.0)
    share = local / peak if peak > 0 else local
    heat = HEAT(share)
    heat[..., 3] = np.where(local > 0, 0.6 + 0.3 * share, 0.0)
    high, wide = (cells * row.side for cells in row.cells)
    axes.imshow(heat, extent=(0, wide, high, 0), interpolation="nearest")
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    said = f"highest {100 * peak:.3g}%"
    if row.num_global:
        said += f", to globals {weights[: row.num_global].sum():.0%}"
    axes.set_title(f"{name}\n{said}", fontsize=7)
    _mark(axes, row)


def _mark(axes: Axes, row: Row) -> None:
    if row.square:
        top, left, side = row.square
        box = Rectangle((left, top), side, side, fill=False, edgecolor=MARK, linewidth=1.2)
        axes.add_patch(box)
