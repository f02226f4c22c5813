"""The base class of patterns, and the operators `|`, `&` and `-` that combine patterns.

Shapes: X Y grid rows and columns, L = X*Y tokens, H heads if their patterns differ, else 1, w chunk
side, Q chunks of w x w tokens.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from vil.utils.registry import Entry, load_object

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Self

Grid = tuple[int, int]
Reach = tuple[int, int]
BY_NUMBER: WeakValueDictionary[int, Pattern] = WeakValueDictionary()
_counter = itertools.count()
LAYOUT = "vil.ops.layout:Layout"  # not imported here, because its module imports this one
DENSITY_CHUNK = 8  # chunk side of the layout that `density` uses
PANEL_INCHES = 4.0  # side of a panel of `Pattern.plot`


class Pairs(NamedTuple):
    """Pairs of a query and a key, given by their positions in a grid of tokens.

    grid: rows and columns of the grid. The other fields are int64 tensors that broadcast to the
    shape of the pairs.
    """

    grid: Grid
    query_row: Tensor
    query_col: Tensor
    key_row: Tensor
    key_col: Tensor

    @property
    def rows(self) -> Tensor:
        """Row of the query minus row of the key."""
        return self.query_row - self.key_row

    @property
    def cols(self) -> Tensor:
        """Column of the query minus column of the key."""
        return self.query_col - self.key_col

    @property
    def query(self) -> Tensor:
        """Index of the query in the grid, row-major."""
        return self.query_row * self.grid[1] + self.query_col

    @property
    def key(self) -> Tensor:
        """Index of the key in the grid, row-major."""
        return self.key_row * self.grid[1] + self.key_col

    @classmethod
    def of_tokens(cls, grid: Grid, query: Tensor, key: Tensor) -> Pairs:
        """Return the pairs of the tokens whose row-major indices are `query` and `key`.

        The two tensors broadcast to the shape of the pairs.
        """
        cols = grid[1]
        return cls(grid, query // cols, query % cols, key // cols, key % cols)

    @classmethod
    def every(cls, grid: Grid) -> Pairs:
        """Return all pairs of tokens in a grid of L tokens. Their positions broadcast to (L, L)."""
        row = torch.arange(grid[0])[:, None].expand(grid).flatten()
        col = torch.arange(grid[1])[None, :].expand(grid).flatten()
        return cls(grid, row[:, None], col[:, None], row, col)


class Pattern:
    """A rule that defines which keys each query of a grid attends to: which pairs are visible.

    A subclass defines `visible`. It should be a frozen dataclass whose fields are the arguments of
    the pattern, so that patterns with equal fields are equal. It may set four attributes:

    heads: H, the number of heads if their patterns differ, else 1.
    invariant: whether visibility depends only on the displacement of a pair (query position minus
    key position). The masks of invariant patterns are computed faster.
    reach: the largest displacement (rows, columns) of a visible pair in any grid; None if it grows
    with the grid. Chunks farther apart are skipped.
    traceable: whether torch.export can trace `visible` for a symbolic grid size. By default the
    same as `invariant`.
    """

    number: int  # identifies the object in this process, as an argument of torch operators
    if TYPE_CHECKING:  # a subclass may define them as properties

        @property
        def heads(self) -> int: ...
        @property
        def invariant(self) -> bool: ...
        @property
        def reach(self) -> Reach | None: ...
        @property
        def precedence(self) -> int: ...
    else:
        heads, invariant, reach = 1, False, None
        precedence = 9  # str() puts operands of lower precedence in parentheses

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "number", next(_counter))
        BY_NUMBER[self.number] = self
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle: all except `number`.

        `number` identifies an object in this process, so each copy gets a new one.
        """
        return {name: value for name, value in vars(self).items() if name != "number"}

    def visible(self, pairs: Pairs) -> Tensor:
        """Return a bool tensor: whether the query of each pair attends to its key.

        It has the shape of the pairs. If patterns differ by head (H > 1), it has an additional
        first dimension H.
        """
        raise NotImplementedError

    def chunk_pairs(self, grid: Grid, chunk: int) -> Tensor:
        """Return a bool tensor (H, Q, Q) or (1, Q, Q): whether query chunks may attend to key
        chunks.

        An entry must be True if any query of the query chunk attends to any key of the key chunk.
        Other entries may also be True, but this costs time. chunk: side of a chunk in tokens.
        """
        rows, cols = chunk_distances(grid, chunk)
        if self.reach is None:
            return torch.ones(1, *rows.shape, dtype=torch.bool)
        # chunks n apart have tokens at least (n - 1) * chunk + 1 apart
        near = [(n - 1) * chunk < reach for n, reach in zip((rows, cols), self.reach)]
        return (near[0] & near[1])[None]

    def check_grid(self, grid: Grid) -> None:
        """Raise ValueError if the pattern is not defined on a grid."""

    def mask(self, grid: Grid) -> Tensor:
        """Return the mask of all query-key pairs of a grid, (L, L) or (H, L, L) bool.

        The mask is True where the query (row) attends to the key (column). It has the dimension H
        only if patterns differ by head.
        """
        self.check_grid(grid)
        pairs = Pairs.every(grid)
        shape = (pairs.grid[0] * pairs.grid[1],) * 2
        visible = self.visible(pairs)
        return visible.expand(*((self.heads,) if self.heads > 1 else ()), *shape)

    def layout(self, grid: Grid, chunk: int = 8) -> Any:
        """Return the pattern's `Layout` on a grid, which `local_attention` takes as `window`.

        chunk: side, in tokens, of the chunks in which attention is computed. It affects the speed,
        not the result.
        """
        return load_object(LAYOUT)(grid, chunk, self)

    def density(self, grid: Grid) -> float:
        """Return the fraction of a grid's query-key pairs that are visible, averaged over heads."""
        return self.layout(grid, DENSITY_CHUNK).count_pairs() / (self.heads * math.prod(grid) ** 2)

    def plot(self, grid: Grid, query: Grid | None = None) -> Figure:
        """Plot two panels for each mask: the keys of one query in the grid, and all pairs.

        query: (row, column) of the query, by default the middle of the grid.
        """
        from matplotlib.figure import Figure

        masks = self.mask(grid).reshape(-1, math.prod(grid), math.prod(grid)).numpy()
        row, col = query or (grid[0] // 2, grid[1] // 2)
        size = (2 * PANEL_INCHES, len(masks) * PANEL_INCHES)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(str(self))
        axes = figure.subplots(len(masks), 2, squeeze=False)
        for number, ((keys, pairs), mask) in enumerate(zip(axes, masks)):
            head = f"head {number}: " if len(masks) > 1 else ""
            of_query = mask[row * grid[1] + col].reshape(grid)
            keys.imshow(of_query, cmap="Blues", vmin=0, vmax=1)
            keys.plot(col, row, "o", color="tab:orange")
            keys.set_title(f"{head}keys of the token at {row}, {col}")
            pairs.imshow(mask, cmap="Blues", vmin=0, vmax=1)
            pairs.set_title("all queries (rows) and keys")
        return figure

    def __or__(self, other: Pattern) -> Pattern:
        return combine("|", self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return combine("&", self, other)

    def __sub__(self, other: Pattern) -> Pattern:
        return combine("-", self, other)

    def __str__(self) -> str:
        """Return the pattern as text, such as "local:5".

        `parse_pattern` can read the text if all arguments are numbers or words.
        """
        # pyrefly: ignore[bad-argument-type]  # subclasses are dataclasses
        arguments = [getattr(self, field.name) for field in fields(self)]
        return f"{self.name}:{','.join(map(str, arguments))}" if arguments else self.name

    @property
    def traceable(self) -> bool:
        return self.invariant

    @property
    def name(self) -> str:
        """The name that the class is registered under; the class name if it is not registered."""
        from vil.ops.patterns import PATTERNS

        cls = type(self)
        home = f"{cls.__module__}:{cls.__qualname__}"
        return next((n for n, e in PATTERNS.items() if e.home in (cls, home)), cls.__name__)


@dataclass(frozen=True)
class Combination(Pattern):
    """Two patterns combined by `|` (union), `&` (intersection) or `-` (difference)."""

    sign: str
    left: Pattern
    right: Pattern

    @property
    def heads(self) -> int:
        return max(self.left.heads, self.right.heads)

    @property
    def invariant(self) -> bool:
        return self.left.invariant and self.right.invariant

    @property
    def reach(self) -> Reach | None:
        left, right = self.left.reach, self.right.reach
        if self.sign == "-":
            return left
        if left is None or right is None:
            return None if self.sign == "|" else left or right
        choose = max if self.sign == "|" else min
        return choose(left[0], right[0]), choose(left[1], right[1])

    @property
    def traceable(self) -> bool:
        return self.left.traceable and self.right.traceable

    @property
    def precedence(self) -> int:
        return OPERATORS[self.sign].precedence

    def visible(self, pairs: Pairs) -> Tensor:
        return OPERATORS[self.sign].join(self.left.visible(pairs), self.right.visible(pairs))

    def chunk_pairs(self, grid: Grid, chunk: int) -> Tensor:
        left = self.left.chunk_pairs(grid, chunk)
        if self.sign == "-":
            return left
        return OPERATORS[self.sign].join(left, self.right.chunk_pairs(grid, chunk))

    def check_grid(self, grid: Grid) -> None:
        self.left.check_grid(grid)
        self.right.check_grid(grid)

    def __str__(self) -> str:
        left, right = str(self.left), str(self.right)
        left = f"({left})" if self.left.precedence < self.precedence else left
        right = f"({right})" if self.right.precedence <= self.precedence else right
        return f"{left} {self.sign} {right}"


class Operator(NamedTuple):
    """An operator that combines two patterns.

    precedence: as in Python, an operator of higher precedence binds tighter.
    join: the function that combines the `visible` tensors of the two patterns.
    """

    precedence: int
    join: Callable[[Tensor, Tensor], Tensor]


OPERATORS = {
    "|": Operator(1, operator.or_),
    "&": Operator(2, operator.and_),
    "-": Operator(3, lambda a, b: a & ~b),
}


def combine(sign: str, left: Pattern, right: Pattern) -> Pattern:
    """Return the combination of two patterns: left | right, left & right or left - right.

    sign: "|", "&" or "-". Raises ValueError if the patterns have different numbers of heads, and
    neither number is 1.
    """
    if not isinstance(right, Pattern):
        return NotImplemented
    if left.heads != right.heads and 1 not in (left.heads, right.heads):
        raise ValueError(
            f"patterns of {left.heads} and of {right.heads} heads cannot be combined by {sign}: "
            "the numbers of heads must be equal, or one of them must be 1"
        )
    return Combination(sign, left, right)


def chunk_distances(grid: Grid, chunk: int) -> tuple[Tensor, Tensor]:
    """Return (rows, columns): the distances between all pairs of the Q chunks of a grid.

    Each is (Q, Q) int64, in chunks. chunk: side of a chunk in tokens.
    """
    rows, cols = (-(-side // chunk) for side in grid)
    number = torch.arange(rows * cols)
    row, col = number // cols, number % cols
    return (row[:, None] - row).abs(), (col[:, None] - col).abs()


def check_entry(cls: Any, entry: Entry) -> None:
    """Raise ValueError if an entry of the pattern registry is invalid.

    cls: the registered object, which must be a function or a `Pattern` subclass that defines
    `visible`. The entry's name must be an identifier.
    """
    if not entry.name.isidentifier():
        raise ValueError(
            f"the pattern name {entry.name!r} must consist of letters, digits and _, "
            "and must not begin with a digit"
        )
    if not callable(cls):
        raise ValueError(f"pattern {entry.name!r} must be a class or a function, got {cls!r}")
    if isinstance(cls, type) and (not issubclass(cls, Pattern) or cls.visible is Pattern.visible):
        raise ValueError(
            f"pattern {entry.name!r} ({cls.__name__}) must be a subclass of "
            "vil.ops.patterns.Pattern that defines the method visible"
        )
