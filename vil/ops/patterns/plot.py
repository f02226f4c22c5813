"""Plot the mask of a pattern.

Shapes: X Y grid rows and columns, L = X*Y tokens, H heads.
"""

from matplotlib.figure import Figure
from torch import Tensor

INCHES = 4.0  # side of a panel


def plot_mask(
    mask: Tensor, grid: tuple[int, int], query: tuple[int, int] | None, title: str
) -> Figure:
    """Plot a mask (L, L) of L tokens, or one per head (H, L, L), with two panels per mask.

    The left panel is the grid, with the keys of one query. The right panel is the mask of all
    pairs. query: (row, column), by default the middle of the grid.
    """
    masks = (mask if mask.ndim == 3 else mask[None]).numpy()
    row, col = query or (grid[0] // 2, grid[1] // 2)
    figure = Figure(figsize=(2 * INCHES, len(masks) * INCHES), layout="constrained")
    figure.suptitle(title)
    for number, (panels, of_head) in enumerate(
        zip(figure.subplots(len(masks), 2, squeeze=False), masks)
    ):
        head = f"head {number}: " if len(masks) > 1 else ""
        panels[0].imshow(of_head[row * grid[1] + col].reshape(grid), cmap="Blues", vmin=0, vmax=1)
        panels[0].plot(col, row, "o", color="tab:orange")
        panels[0].set_title(f"{head}keys of the token at {row}, {col}")
        panels[1].imshow(of_head, cmap="Blues", vmin=0, vmax=1)
        panels[1].set_title("all queries (rows) and keys")
    return figure
