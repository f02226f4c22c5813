"""Pictures of the attention pattern: which tokens a query sees, for each mask and mode."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = ListedColormap(["#f2f2f2", "#9ecae1", "#08519c"])  # unseen, seen, the query


def seen_from(visible: torch.Tensor, grid: tuple[int, int], token: tuple[int, int]) -> np.ndarray:
    """visible (L, L) bool, queries by rows -> (X, Y): 0 unseen, 1 seen by the token, 2 the token
    itself.
    """
    picture = visible[token[0] * grid[1] + token[1]].reshape(grid).numpy().astype(int)
    picture[token] = 2
    return picture


def draw_patterns(panels: dict[str, tuple[np.ndarray, int]], path: str | Path) -> None:
    """One panel per title: its picture (X, Y) from `seen_from` and the side of its chunks, drawn as
    lines.
    """
    figure = Figure(figsize=(3.1 * len(panels), 3.6), layout="constrained")
    for axes, (title, (picture, size)) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items()
    ):
        rows, cols = picture.shape
        axes.imshow(picture, cmap=COLOURS, vmin=0, vmax=2)
        axes.set_xticks(np.arange(-0.5, cols), minor=True)
        axes.set_yticks(np.arange(-0.5, rows), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        for row in range(0, rows, size):
            for col in range(0, cols, size):
                extent = min(size, cols - col), min(size, rows - row)
                axes.add_patch(
                    Rectangle((col - 0.5, row - 0.5), *extent, fill=False, edgecolor="#555555")
                )
        axes.add_patch(Rectangle((-0.5, -2), 1, 1, facecolor=COLOURS(1), clip_on=False))
        axes.text(1, -1.45, "global token", fontsize=8, va="center")
        axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
        axes.set_title(title, fontsize=10, pad=27)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.savefig(path, dpi=110)
