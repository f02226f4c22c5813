"""Attention patterns given by a list of tokens or by a mask.

Shapes: L tokens of a grid, H heads, Q chunks of a grid.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vil.ops.patterns.base import Grid, Pairs, Pattern
from vil.ops.patterns.geometric import check_count

Mask = Tensor | np.ndarray | str | Path


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """A pattern that makes some tokens of the grid global: they attend to all tokens, and all
    tokens attend to them.

    tokens: (row, column) positions of the global tokens, or a number n for the first n tokens of
    the grid.

    Tokens that a model adds to the grid, such as a class token, are global without this pattern.
    """

    tokens: int | tuple[tuple[int, int], ...] = 1

    def __post_init__(self) -> None:
        if isinstance(self.tokens, int):
            check_count("global_tokens: the number of tokens", self.tokens)
            return
        try:
            positions = tuple(
                (operator.index(row), operator.index(col)) for row, col in self.tokens
            )
        except (TypeError, ValueError):  # not pairs of whole numbers
            positions = ()
        if not positions or min(map(min, positions)) < 0:
            raise ValueError(
                "global_tokens: expected a number of tokens, or a list of (row, column) positions "
                f"without negative numbers, got {self.tokens!r}"
            )
        object.__setattr__(self, "tokens", positions)

    def visible(self, pairs: Pairs) -> Tensor:
        indices = torch.tensor(self._indices(pairs.grid))
        return torch.isin(pairs.query, indices) | torch.isin(pairs.key, indices)

    def chunk_pairs(self, grid: Grid, chunk: int) -> Tensor:
        rows, cols = (-(-side // chunk) for side in grid)
        has_global = torch.zeros(rows * cols, dtype=torch.bool)
        for index in self._indices(grid):
            row, col = divmod(index, grid[1])
            has_global[row // chunk * cols + col // chunk] = True
        return (has_global[:, None] | has_global)[None]

    def check_grid(self, grid: Grid) -> None:
        positions = () if isinstance(self.tokens, int) else self.tokens
        outside = [p for p in positions if p[0] >= grid[0] or p[1] >= grid[1]]
        if outside:
            raise ValueError(
                f"global_tokens: {outside[0]} is outside of the grid of {size(grid)} tokens"
            )

    def _indices(self, grid: Grid) -> list[int]:
        """Return the row-major indices of `tokens` in a grid."""
        if isinstance(self.tokens, int):
            return list(range(min(self.tokens, math.prod(grid))))
        return [row * grid[1] + col for row, col in self.tokens]


@dataclass(frozen=True, eq=False)
class TokenMask(Pattern):
    """A pattern given by a mask of token pairs, for grids of L tokens. See `from_mask`.

    array (H or 1, L, L) bool: True where a query (row) attends to a key (column), for each head or
    for all heads.
    source: path of the file with the mask; "" if there is none.
    """

    array: Tensor = field(repr=False)
    source: str = ""

    @property
    def heads(self) -> int:
        return len(self.array)

    def visible(self, pairs: Pairs) -> Tensor:
        return drop_single_head(self.array[:, pairs.query, pairs.key])

    def check_grid(self, grid: Grid) -> None:
        if math.prod(grid) != self.array.shape[1]:
            length = math.prod(grid)
            raise ValueError(
                f"from_mask: a grid of {size(grid)} tokens needs a mask of {length} x {length} "
                f"pairs, got {' x '.join(map(str, self.array.shape[1:]))}"
            )

    def __str__(self) -> str:
        return f"from_mask:{self.source or ' x '.join(map(str, self.array.shape))}"


@dataclass(frozen=True, eq=False)
class ChunkMask(Pattern):
    """A pattern given by a mask of chunk pairs, for grids of Q chunks. See `from_blocks`.

    array (H or 1, Q, Q) bool: True where a query chunk (row) attends to a key chunk (column), for
    each head or for all heads.
    chunk: side of a chunk in tokens.
    source: path of the file with the mask; "" if there is none.
    """

    array: Tensor = field(repr=False)
    chunk: int = 8
    source: str = ""

    @property
    def heads(self) -> int:
        return len(self.array)

    def visible(self, pairs: Pairs) -> Tensor:
        cols = -(-pairs.grid[1] // self.chunk)
        query = pairs.query_row // self.chunk * cols + pairs.query_col // self.chunk
        key = pairs.key_row // self.chunk * cols + pairs.key_col // self.chunk
        return drop_single_head(self.array[:, query, key])

    def chunk_pairs(self, grid: Grid, chunk: int) -> Tensor:
        return self.array if chunk == self.chunk else super().chunk_pairs(grid, chunk)

    def check_grid(self, grid: Grid) -> None:
        count = math.prod(-(-side // self.chunk) for side in grid)
        if count != self.array.shape[1]:
            raise ValueError(
                f"from_blocks: a grid of {size(grid)} tokens has {count} chunks of {self.chunk} x "
                f"{self.chunk}, so the mask must have {count} x {count} entries, got "
                f"{' x '.join(map(str, self.array.shape[1:]))}"
            )

    def __str__(self) -> str:
        return f"from_blocks:{self.source or ' x '.join(map(str, self.array.shape))},{self.chunk}"


def from_mask(mask: Mask) -> TokenMask:
    """Return the pattern given by a mask of token pairs.

    mask: a bool array (L, L) for grids of L tokens, or (H, L, L) with a mask per head, or the path
    of a .npy file with the array. It is True where a query (row) attends to a key (column). Tokens
    are numbered row by row.
    Raises ValueError if the array has another shape or dtype.
    """
    array, source = _read(mask, "from_mask", "(L, L) or (heads, L, L)")
    return TokenMask(array, source)


def from_blocks(blocks: Mask, chunk: int) -> ChunkMask:
    """Return the pattern given by a mask of chunk pairs.

    blocks: a bool array (Q, Q) for grids of Q chunks, or (H, Q, Q) with a mask per head, or the
    path of a .npy file with the array. If entry (i, j) is True, all queries of chunk i attend to
    all keys of chunk j. Chunks are numbered row by row.
    chunk: side of a chunk in tokens.
    Raises ValueError if the array has another shape or dtype.
    """
    check_count("from_blocks: the side of a chunk", chunk)
    array, source = _read(blocks, "from_blocks", "(Q, Q) or (heads, Q, Q)")
    return ChunkMask(array, chunk, source)


def _read(mask: Mask, name: str, expected: str) -> tuple[Tensor, str]:
    """Read and check a mask, an array or the path of a .npy file. Returns (tensor, path).

    tensor: a CPU tensor (H or 1, n, n) bool. path: the path of the file, or "" for an array.
    name, expected: for error messages, the name of the pattern and the allowed shapes.
    """
    source = str(mask) if isinstance(mask, str | Path) else ""
    if source:
        try:
            with open(source, "rb") as file:
                mask = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {source} cannot be read as .npy: {error}") from None
    if not isinstance(mask, Tensor):  # from_numpy ignores a default device such as meta
        mask = torch.from_numpy(np.asarray(mask))
    if mask.dtype != torch.bool or mask.ndim not in (2, 3) or mask.shape[-1] != mask.shape[-2]:
        raise ValueError(
            f"{name}: expected a bool mask {expected}, got {tuple(mask.shape)} of type {mask.dtype}"
        )
    return (mask[None] if mask.ndim == 2 else mask).cpu().contiguous(), source


def drop_single_head(visible: Tensor) -> Tensor:
    """Remove the first dimension, the heads, if its size is 1."""
    return visible[0] if len(visible) == 1 else visible


def size(grid: Grid) -> str:
    """Format the size of a grid for messages, such as "7 x 8"."""
    return f"{grid[0]} x {grid[1]}"
