"""Format rows of text as aligned columns."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Format a table as lines of text with aligned columns. The first `num_left` columns are
    aligned to the left, the others to the right. rows: the texts of the cells of each row."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(_pad(row, widths, num_left)).rstrip() for row in rows)


def _pad(row: Sequence[str], widths: Sequence[int], num_left: int) -> list[str]:
    cells = enumerate(zip(row, widths))
    return [cell.ljust(w) if i < num_left else cell.rjust(w) for i, (cell, w) in cells]
