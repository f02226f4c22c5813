"""Draw the README's picture: what one token sees, for each mask and with random shift.

python docs/draw_pattern.py docs/pattern.png
"""

import sys

from vil.ops import Window
from vil.ops.backends.masked import dense_window
from vil.report.pattern import draw_patterns, seen_from

GRID, SIZE = (12, 14), 3
PANELS = {  # title: SW_EXACT, neighbour mode, the query's row and column
    "chunks (SW_EXACT 0)": (0, 0, (4, 7)),
    "exact (SW_EXACT 1)": (1, 0, (4, 7)),
    "cyclic (SW_EXACT -1)": (-1, 0, (1, 7)),
    "random shift, one draw": (0, 3, (4, 7)),
}

if __name__ == "__main__":
    pictures = {}
    for title, (exact, mode, token) in PANELS.items():
        visible, _ = dense_window(Window.from_mode(GRID, SIZE, exact, mode))
        pictures[title] = seen_from(visible, GRID, token), SIZE
    draw_patterns(pictures, sys.argv[1])
