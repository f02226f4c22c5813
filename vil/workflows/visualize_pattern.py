"""Draw which tokens a query attends to, for masks and modes of the window."""

import re
from collections.abc import Sequence
from pathlib import Path

from vil.ops import Window
from vil.ops.reference import attended_keys
from vil.ops.window import Mask
from vil.report.pattern import draw_patterns, seen_from
from vil.utils.errors import ConfigError
from vil.utils.output_paths import refuse_failed_writes

MOST = 1024  # tokens along a side: beyond, a token is smaller than a pixel
WIDEST = 256  # the side of a chunk: its pairs are walked one by one


def visualize_pattern(
    grid: str,
    window: int,
    out: Path,
    *,
    masks: Sequence[int] = (0,),
    modes: Sequence[int] = (0,),
    tokens: Sequence[str] = (),
) -> None:
    """Draw a panel per mask, mode and token ("row,col"; the middle one by default) to `out`.

    grid: "12x17" or "14". window: the side of a chunk. Lists have one item, or as many as the
    longest.
    """
    size = grid_of(grid)
    tokens = list(tokens) or [f"{size[0] // 2},{size[1] // 2}"]
    lists = dict(zip(("--sw-exact", "--mode", "--token"), (list(masks), list(modes), tokens)))
    panels = [panel(size, window, *row) for row in zip(*paired(lists))]
    with refuse_failed_writes(out):
        draw_patterns(panels, out)


def grid_of(text: str) -> tuple[int, int]:
    """'12x17' -> (12, 17), '14' -> (14, 14)."""
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    if not found:
        raise ConfigError(f"--grid {text}: expected rows and columns, such as 12x17 or 14")
    grid = int(found[1]), int(found[2] or found[1])
    if not 1 <= min(grid) <= max(grid) <= MOST:
        raise ConfigError(f"--grid {text}: expected 1 to {MOST} tokens along a side")
    return grid


def parse_token(text: str, size: tuple[int, int], unit: str) -> tuple[int, int]:
    """'3,4' -> (3, 4), inside of `size` tokens or pixels. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not found:
        raise ConfigError(f"--token {text}: expected a row and a column from 0, such as 3,4")
    row, col = int(found[1]), int(found[2])
    if not (row < size[0] and col < size[1]):
        raise ConfigError(f"--token {text}: outside of {size[0]} x {size[1]} {unit}")
    return row, col


def paired(lists: dict[str, list]) -> list[list]:
    """The lists, those of one item as long as the longest."""
    most = max(map(len, lists.values()))
    for flag, items in lists.items():
        if len(items) not in (1, most):
            raise ConfigError(f"{flag} has {len(items)} items: expected 1 or, as others, {most}")
    return [items * most if len(items) == 1 else items for items in lists.values()]


def panel(grid: tuple[int, int], size: int, exact: int, mode: int, token: str) -> tuple:
    """Title, picture and chunk side of what one token sees."""
    place = parse_token(token, grid, "tokens")
    if size > WIDEST:
        raise ConfigError(f"--window {size}: expected at most {WIDEST}")
    try:
        window = Window.from_mode(grid, size, exact, mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    met = [(row, col) for row, col, _ in attended_keys(window, *place)]
    title = f"SW_EXACT {exact} ({Mask(exact).name.lower()}), MODE {mode}"
    seen = f"{len(set(met))} of {grid[0] * grid[1]} tokens, and the global ones"
    return f"{title}\n{seen}", seen_from(met, grid, place), size
