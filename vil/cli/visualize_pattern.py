"""Draw the tokens that a query token attends to, in local attention with a window or a pattern.

  vil visualize pattern --grid 12x17 --window 5
  vil visualize pattern --grid 12x17 --window 5 --sw-exact 1 --token 3,4 --out exact.png
  vil visualize pattern --grid 14 --window 4 --sw-exact 0 1 -1               a panel for each mask
  vil visualize pattern --grid 14 --window 4 --mode 0 -1 1 2 3 4 5 6 7 8     a panel for each mode
  vil visualize pattern --grid 14 --pattern "axial | local:2" "swin:4" --out patterns.png
  vil visualize pattern --grid 12x14 --window 3 --sw-exact 0 1 -1 0 --mode 0 0 0 3 \\
      --token 4,7 4,7 1,7 4,7 --out docs/pattern.png                         the plot of the docs

To draw several panels, give each flag a value per panel, or one value for all panels. --token is
the row and column of the query, from 0; by default the center. Queries also attend to all global
tokens, which are not part of the grid. docs/internals/operation.md explains masks and modes, and
docs/guides/patterns.md explains patterns.
"""

import argparse

from vil.utils.output_paths import IMAGE_SUFFIXES, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", required=True, metavar="XxY", help="grid size in tokens, such as 12x17 or 14")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--window", type=int, metavar="W", help="window size: side of a chunk")
    text = 'patterns such as "axial | local:5" instead of a window'
    choice.add_argument("--pattern", nargs="+", default=[], metavar="TEXT", help=text)
    numbers = dict(nargs="+", type=int, default=[0], metavar="N")
    text = "mask: 0 cuts chunks at the border, 1 is the exact window, -1 is cyclic (0)"
    add("--sw-exact", help=text, **numbers)
    text = "mode: 0 is all 9 chunks, -1 the self chunk, 1 to 8 the self chunk and a neighbor (0)"
    add("--mode", help=text, **numbers)
    add("--token", nargs="+", metavar="ROW,COL", help="position of the query (default: the center)")
    add("--out", default="pattern.png", metavar="FILE", help="image file to write (pattern.png)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.visualize import visualize_pattern

    path = output_file(args.out, "--out", IMAGE_SUFFIXES)
    masks, modes, tokens = args.sw_exact, args.mode, args.token or []
    options = dict(masks=masks, modes=modes, tokens=tokens, patterns=args.pattern)
    visualize_pattern(args.grid, args.window, path, **options)
    print(path)
    return 0
