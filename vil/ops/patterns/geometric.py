"""Patterns that depend on the positions of query and key: local, axial, dilated and windows.

Shapes: X Y grid rows and columns, w side of a window, Q chunks.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from vil.ops.patterns.base import Grid, Pairs, Pattern, Reach, chunk_distances
from vil.ops.window import Mask, Window

NORMS = ("max", 1, 2)


@dataclass(frozen=True)
class Local(Pattern):
    """A pattern of keys up to a maximum distance from the query.

    distance: the largest distance in tokens. norm: "max" for a square of keys, 2 for a disk
    (Euclidean distance), 1 for a diamond (rows plus columns).
    Raises ValueError if the distance is negative or infinite, or if the norm is unknown.
    """

    distance: float
    norm: int | str = "max"
    invariant = True

    def __post_init__(self) -> None:
        if not isinstance(self.distance, int | float) or not 0 <= self.distance < math.inf:
            raise ValueError(f"local: the distance must be at least 0, got {self.distance!r}")
        if self.norm not in NORMS:
            raise ValueError(f"local: the norm must be one of max, 1, 2, got {self.norm!r}")

    @property
    def reach(self) -> Reach:
        return (math.floor(self.distance),) * 2

    def visible(self, pairs: Pairs) -> Tensor:
        rows, cols = pairs.rows.abs(), pairs.cols.abs()
        if self.norm == "max":
            return (rows <= self.distance) & (cols <= self.distance)
        if self.norm == 1:
            return rows + cols <= self.distance
        return rows**2 + cols**2 <= self.distance**2


@dataclass(frozen=True)
class Axial(Pattern):
    """A pattern of the keys in the query's row and column.

    Source: Axial Attention in Multidimensional Transformers, arXiv:1912.12180. Unlike in the paper,
    both axes share one softmax.
    """

    invariant = True

    def visible(self, pairs: Pairs) -> Tensor:
        return (pairs.rows == 0) | (pairs.cols == 0)

    def chunk_pairs(self, grid: Grid, chunk: int) -> Tensor:
        rows, cols = chunk_distances(grid, chunk)
        return ((rows == 0) | (cols == 0))[None]


@dataclass(frozen=True)
class Dilated(Pattern):
    """A pattern of keys whose row and column distances to the query are both multiples of `step`.

    Raises ValueError unless `step` is an integer of at least 1.
    """

    step: int
    invariant = True

    def __post_init__(self) -> None:
        check_count("dilated: the step", self.step)

    def visible(self, pairs: Pairs) -> Tensor:
        return (pairs.rows % self.step == 0) & (pairs.cols % self.step == 0)


@dataclass(frozen=True)
class Swin(Pattern):
    """A pattern of the keys in the query's window, for non-overlapping windows of w x w tokens.

    window: w. shift: rows and columns by which the windows are shifted, from 0 to w - 1. Windows
    are truncated at the border of the grid, as with Swin's attention masks.
    Raises ValueError if the window is below 1, or if the shift is out of range.
    Source: Swin Transformer, arXiv:2103.14030, section 3.2.
    """

    window: int
    shift: int = 0
    traceable = True

    def __post_init__(self) -> None:
        check_count("swin: the window", self.window)
        if not isinstance(self.shift, int) or not 0 <= self.shift < self.window:
            raise ValueError(
                f"swin: the shift must be from 0 to {self.window - 1}, got {self.shift!r}"
            )

    @property
    def reach(self) -> Reach:
        return (self.window - 1,) * 2

    def visible(self, pairs: Pairs) -> Tensor:
        same_rows = self._number(pairs.query_row) == self._number(pairs.key_row)
        return same_rows & (self._number(pairs.query_col) == self._number(pairs.key_col))

    def _number(self, line: Tensor) -> Tensor:
        """Return the indices of the windows that contain the rows (or columns) `line`."""
        return (line - self.shift) // self.window


@dataclass(frozen=True)
class ChunkWindow(Pattern):
    """The window of Vision Longformer as a pattern. See `vil.ops.window.Window`.

    size: w, the side of a chunk in tokens.
    sw_exact: 1 for keys at most w rows and columns away, 0 for all keys of the attended chunks.
    mode: 0 for the 3 x 3 chunks around the query, -1 for the query's chunk only.

    Raises ValueError for other values, and for mode -1 with sw_exact 1. Cyclic windows (sw_exact
    -1) are not supported, because their queries may attend to a key twice, with different biases.
    """

    size: int
    sw_exact: int = 0
    mode: int = 0
    traceable = True

    def __post_init__(self) -> None:
        check_count("window: the size", self.size)
        if self.sw_exact == Mask.CYCLIC:
            raise ValueError(
                "window: in a cyclic window (SW_EXACT -1) a query may attend to a key twice, "
                "which a pattern cannot express: use longformer attention instead"
            )
        if self.mode not in (0, -1):
            raise ValueError(f"window: the mode must be 0 or -1, got {self.mode!r}")
        Window.from_mode((1, 1), self.size, self.sw_exact, self.mode)

    @property
    def invariant(self) -> bool:
        return self.sw_exact == Mask.EXACT

    @property
    def reach(self) -> Reach:
        chunks = self.size if self.mode == 0 else 0  # beyond the query's chunk
        return (self.size if self.sw_exact == Mask.EXACT else self.size - 1 + chunks,) * 2

    def visible(self, pairs: Pairs) -> Tensor:
        if self.sw_exact == Mask.EXACT:
            return Local(self.size).visible(pairs)
        rows = pairs.query_row // self.size - pairs.key_row // self.size
        cols = pairs.query_col // self.size - pairs.key_col // self.size
        return (rows.abs() <= self.mode + 1) & (cols.abs() <= self.mode + 1)


def check_count(what: str, value: object) -> None:
    """Raise ValueError unless a value is an integer of at least 1.

    what: the noun for the value in the message, such as "dilated: the step".
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")
