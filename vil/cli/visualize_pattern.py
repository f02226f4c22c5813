"""Draw whom a token sees: the window of local attention, for masks and neighbour modes.

  vil visualize pattern --grid 12x17 --window 5
  vil visualize pattern --grid 12x17 --window 5 --sw-exact 1 --token 3,4 --out exact.png
  vil visualize pattern --grid 14 --window 4 --sw-exact 0 1 -1               a panel for each mask
  vil visualize pattern --grid 14 --window 4 --mode 0 -1 1 2 3 4 5 6 7 8     and for each mode
  vil visualize pattern --grid 12x14 --window 3 --sw-exact 0 1 -1 0 --mode 0 0 0 3 \\
      --token 4,7 4,7 1,7 4,7 --out docs/pattern.png                         the picture of the docs

Masks, modes and tokens of several panels stand in lists of one length; a list of one serves all
panels. --token is a row and a column of tokens, from 0; without it the one in the middle. Local
tokens also see every global token, which lie outside the grid. docs/attention.md says more.
"""

import argparse
import re

from vil.cli.output import PICTURES, output_file, written
from vil.config import ConfigError

MOST = 1024  # tokens along a side: beyond, a token is smaller than a pixel
WIDEST = 256  # the side of a chunk: its pairs are walked one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", required=True, metavar="XxY", help="rows and columns of tokens, 12x17 or 14")
    add("--window", required=True, type=int, metavar="W", help="w, the side of a chunk")
    add(
        "--sw-exact",
        "--sw_exact",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="0 chunks cut at the border, 1 the exact window, -1 cyclic (0)",
    )
    add(
        "--mode",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="0 all nine chunks, -1 the own, 1 to 8 the own and a neighbour (0)",
    )
    add("--token", nargs="+", metavar="ROW,COL", help="whose view is drawn (the middle one)")
    add("--out", default="pattern.png", metavar="FILE", help="of the picture (pattern.png)")


def run(args: argparse.Namespace) -> int:
    from vil.report.pattern import draw_patterns

    path = output_file(args.out, endings=PICTURES)
    grid = grid_of(args.grid)
    tokens = args.token or [f"{grid[0] // 2},{grid[1] // 2}"]
    lists = dict(zip(("--sw-exact", "--mode", "--token"), (args.sw_exact, args.mode, tokens)))
    rows = zip(*paired(lists))
    panels = [panel(grid, args.window, exact, mode, token) for exact, mode, token in rows]
    with written(path):
        draw_patterns(panels, path)
    print(path)
    return 0


def grid_of(text: str) -> tuple[int, int]:
    """'12x17' -> (12, 17), '14' -> (14, 14)."""
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    if not found:
        raise ConfigError(f"--grid {text}: expected rows and columns, such as 12x17 or 14")
    grid = int(found[1]), int(found[2] or found[1])
    if not 1 <= min(grid) <= max(grid) <= MOST:
        raise ConfigError(f"--grid {text}: expected 1 to {MOST} tokens along a side")
    return grid


def token_of(text: str) -> tuple[int, int]:
    """'3,4' -> (3, 4)."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not found:
        raise ConfigError(f"--token {text}: expected a row and a column from 0, such as 3,4")
    return int(found[1]), int(found[2])


def paired(lists: dict[str, list]) -> list[list]:
    """The lists, those of one item as long as the longest."""
    most = max(map(len, lists.values()))
    for flag, items in lists.items():
        if len(items) not in (1, most):
            raise ConfigError(f"{flag} has {len(items)} items: expected 1 or, as others, {most}")
    return [items * most if len(items) == 1 else items for items in lists.values()]


def panel(grid: tuple[int, int], size: int, exact: int, mode: int, token: str) -> tuple:
    """Title, picture and chunk side of what one token sees."""
    from vil.ops import Window
    from vil.ops.reference import attended_keys
    from vil.ops.window import Mask
    from vil.report.pattern import seen_from

    place = token_of(token)
    if not (place[0] < grid[0] and place[1] < grid[1]):
        raise ConfigError(f"--token {token}: outside the grid of {grid[0]} x {grid[1]} tokens")
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
