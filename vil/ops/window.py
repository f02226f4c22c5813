"""The 2-D window of local attention: which chunks a query attends to, and the masks.

Shapes: B batch, X Y grid rows and columns, L = X*Y tokens, w chunk side, W = w*w tokens of a chunk,
R C rows and columns of the chunk grid (R = ceil(X / w)), K chunk offsets.

A query attends to its own chunk and to chunks at certain offsets from it (Vision Longformer,
arXiv:2103.15358, section 3.1). A neighbor mode is a number that selects all nine chunks, the
query's chunk only or, for random shift (section 3.3), the query's chunk and one neighbor.

The mask of a call combines a mask of padded rows, a mask of padded columns, and the mask of the
exact window, (W, K*W). None of them has L x L entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from vil.utils.transforms import is_exporting, untraced

ALL_NINE = tuple(product((-1, 0, 1), (-1, 0, 1)))  # (rows, columns) in chunks, row-major
SELF_CHUNK = (0, 0)
# neighbor mode m (1 to 8) selects NEIGHBORS[m - 1]
NEIGHBORS = tuple(offset for offset in ALL_NINE if offset != SELF_CHUNK)


class Mask(IntEnum):
    """The mask of a window: which tokens of the attended chunks are keys of a query.

    The values are those of the config key SW_EXACT.
    """

    EXACT = 1  # keys at most w rows and w columns away
    CHUNKS = 0  # all keys inside the grid
    CYCLIC = -1  # all keys, with the chunk grid wrapped around

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"the mask must be 1 (exact), 0 (chunks) or -1 (cyclic), got {value}")


def mode_offsets(mode: int) -> tuple[tuple[int, int], ...]:
    """Return the chunk offsets (rows, columns) that a neighbor mode selects.

    mode: 0 for all nine chunks, -1 for the query's chunk only, 1 to 8 for the query's chunk and its
    neighbor at NEIGHBORS[mode - 1].
    """
    if mode == 0:
        return ALL_NINE
    if mode == -1:
        return (SELF_CHUNK,)
    if 1 <= mode <= 8:
        return (SELF_CHUNK, NEIGHBORS[mode - 1])
    raise ValueError(
        "mode must be -1 (the query's chunk), 0 (all nine chunks) or 1..8 (one neighbor), "
        f"got {mode}"
    )


def real_cells(valid_hw: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which positions of a feature map are not padding, (B, 1, X, Y) bool.

    valid_hw (B, 2): rows and columns of each image that are not padding. size: (X, Y).
    """
    rows, cols = (torch.arange(n, device=valid_hw.device) for n in size)
    inside = (rows < valid_hw[:, :1])[:, :, None] & (cols < valid_hw[:, 1:])[:, None]
    return inside[:, None]


def make_offsets(offsets: tuple[tuple[int, int], ...], device: torch.device | str) -> Tensor:
    """Return chunk offsets as a tensor (K, 2) int64. It is cached unless a tracer must see it."""
    if torch.compiler.is_compiling() or is_exporting():
        return torch.tensor(offsets, device=device)
    return _cached_offsets(offsets, str(device))


@lru_cache(maxsize=64)  # because a copy to a GPU makes the host wait
@untraced
def _cached_offsets(offsets: tuple[tuple[int, int], ...], device: str) -> Tensor:
    return torch.tensor(offsets, device=device)


@dataclass(frozen=True)
class ChunkGrid:
    """A grid of tokens that is divided into chunks of w x w tokens.

    grid: rows and columns (X, Y) of tokens. size: w.
    """

    grid: tuple[int, int]
    size: int

    @property
    def symbolic(self) -> bool:
        """Whether a side of the grid is symbolic, such as a dynamic dimension of torch.export."""
        return any(isinstance(n, torch.SymInt) for n in self.grid)

    @property
    def length(self) -> int:
        """L, the number of tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def tile(self) -> int:
        """W, the number of tokens of a chunk."""
        return self.size * self.size

    @property
    def chunks(self) -> tuple[int, int]:
        """(R, C): the rows and columns of the chunk grid. The last chunks may be partly padding."""
        rows, cols = self.grid
        return (rows + self.size - 1) // self.size, (cols + self.size - 1) // self.size


@dataclass(frozen=True)
class Window(ChunkGrid):
    """The window of local attention: which keys each token of a grid attends to.

    grid: rows and columns of tokens.
    size: w, the chunk side. With the exact mask, it is also the largest distance of a key from its
    query, in rows and in columns.
    mask: a `Mask` or its value.
    offsets: the chunks that a query attends to, as (row, column) offsets from the query's chunk.

    Raises ValueError for a grid side or a size below 1, for an unknown mask, and for invalid
    offsets. Offsets must be distinct members of ALL_NINE and include (0, 0). With the exact mask,
    they must be ALL_NINE.
    """

    mask: Mask = Mask.CHUNKS
    offsets: tuple[tuple[int, int], ...] = ALL_NINE

    def __post_init__(self) -> None:
        if min(self.grid) < 1 or self.size < 1:
            raise ValueError(
                f"grid and window must be positive, got grid {self.grid}, window {self.size}"
            )
        if not isinstance(self.mask, Mask):
            object.__setattr__(self, "mask", Mask(self.mask))
        distinct = set(self.offsets)
        if (
            SELF_CHUNK not in distinct
            or not distinct <= set(ALL_NINE)
            or len(distinct) < len(self.offsets)
        ):
            raise ValueError(
                "offsets must be distinct, from -1 to 1 in rows and columns, and include (0, 0), "
                f"got {self.offsets}"
            )
        if self.mask == Mask.EXACT and self.offsets != ALL_NINE:
            raise ValueError(
                f"the exact window (mask 1) needs all nine chunks, got the offsets {self.offsets}: "
                "use mode 0 for all nine chunks, or change the mask to 0 or -1"
            )

    @classmethod
    def from_mode(
        cls, grid: tuple[int, int], size: int, mask: int = Mask.CHUNKS, mode: int = 0
    ) -> Window:
        """Return a window with the chunk offsets of a neighbor mode.

        grid: rows and columns of tokens. size: w, the chunk side. mask: a `Mask` or its value.
        mode: -1 to 8, see `mode_offsets`.
        """
        return cls(grid, size, Mask(mask), mode_offsets(mode))

    @property
    def cyclic(self) -> bool:
        return self.mask == Mask.CYCLIC

    @property
    def covers_grid(self) -> bool:
        """Whether the grid is a single chunk in which every token attends to every token once."""
        return not self.symbolic and self.chunks == (1, 1) and not self.repeats()

    @property
    def attends_all(self) -> bool:
        """Whether every token attends to every token once, in one or in several chunks."""
        if self.symbolic or self.repeats():
            return False
        reach = self.size if self.mask == Mask.EXACT else max(self.grid)
        near = max(self.chunks) <= 2 and max(self.grid) <= reach + 1
        return self.chunks == (1, 1) or (near and self.offsets == ALL_NINE)

    @property
    def table_entries(self) -> int:
        """The number of bias table entries for each head: (4w-1)**2."""
        return (4 * self.size - 1) ** 2

    def repeats(self) -> bool:
        """Return whether a query may attend to a key more than once.

        This happens in cyclic grids with few chunks.
        """
        if not self.cyclic:
            return False
        rows, cols = self.chunks
        distinct = {(dx % rows, dy % cols) for dx, dy in self.offsets}
        return len(distinct) < len(self.offsets)

    def without_absent(self) -> Window:
        """Return the window with only the offsets at which some chunk has a neighbor in the grid.

        Cyclic, exact and symbolic windows are returned unchanged.
        """
        if self.cyclic or self.mask == Mask.EXACT or self.symbolic:
            return self
        rows, cols = self.chunks
        offsets = tuple(o for o in self.offsets if abs(o[0]) < rows and abs(o[1]) < cols)
        return replace(self, offsets=offsets)

    def bias_index(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the index of each query-key pair in a flattened bias table, (W, K*W) int64.

        The W queries are the tokens of any chunk, and the K*W keys are the tokens of the K chunks
        at `offsets`. The table has 4w-1 rows and columns. A pair's row is 2w-1 + (query row - key
        row), and its column is computed likewise.
        """
        (qx, qy), (kx, ky) = self._tile_positions(device)
        side = 4 * self.size - 1
        return (qx - kx + 2 * self.size - 1) * side + (qy - ky + 2 * self.size - 1)

    def visible(self, valid_hw: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return whether each query attends to each key, (B or 1, R, C, W or 1, K*W) bool.

        Each of R x C chunks has W queries. Their K*W keys are the tokens of the K chunks at
        `offsets`. The first dimension is 1 without `valid_hw`, and the fourth is 1 unless the mask
        is exact. valid_hw (B, 2): rows and columns of each image that are not padding.
        """
        rows, cols = self._real(0, valid_hw, device), self._real(1, valid_hw, device)
        real = rows[:, :, None, :, :, None] & cols[:, None, :, :, None, :]
        real = real.flatten(3).unsqueeze(3)
        return real & self.reach(device) if self.mask == Mask.EXACT else real

    def neighbor_tokens(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the indices of the tokens that each chunk attends to, (R, C, K*W) int64.

        These are the W tokens of each of the K chunks at `offsets`. Positions outside the grid get
        the index of the nearest token inside it.
        """
        rows, cols = (self._lines(axis, device).clamp(0, self.grid[axis] - 1) for axis in range(2))
        return (rows[:, None, :, :, None] * self.grid[1] + cols[:, :, None]).flatten(2)

    def reach(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the mask of the exact window, (W, K*W) bool, which is the same for all chunks.

        It is True for keys at most w rows and w columns away. The W queries are the tokens of a
        chunk, and the K*W keys are the tokens of the K chunks at `offsets`.
        """
        (qx, qy), (kx, ky) = self._tile_positions(device)
        return ((qx - kx).abs() <= self.size) & ((qy - ky).abs() <= self.size)

    def _tile_positions(self, device: torch.device | str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the positions of a chunk's W queries and of their K*W keys.

        The positions of queries are [rows (W, 1), columns (W, 1)], those of keys [rows (1, K*W),
        columns (1, K*W)]. They are relative to the first token of the chunk.
        """
        inside = torch.arange(self.size, device=device)
        lines = [x.flatten() for x in torch.meshgrid(inside, inside, indexing="ij")]  # (W,) each
        shifts = make_offsets(self.offsets, device) * self.size  # (K, 2)
        keys = [(shifts[:, axis, None] + line).reshape(1, -1) for axis, line in enumerate(lines)]
        return [line[:, None] for line in lines], keys

    def _real(self, axis: int, valid_hw: Tensor | None, device: torch.device | str) -> Tensor:
        """Return whether each row (axis 0) or column (axis 1) of `_lines` is inside the image.

        Returns (B or 1, R, K, w) bool. It is False outside the grid and for the padding described
        by `valid_hw`. Without `valid_hw`, the first dimension is 1.
        """
        line = self._lines(axis, device)
        real = ((line >= 0) & (line < self.grid[axis]))[None]
        if valid_hw is None:
            return real
        return real & (line < valid_hw[:, axis, None, None, None].to(device))

    def _lines(self, axis: int, device: torch.device | str) -> Tensor:
        """Return the row (axis 0) or column (axis 1) numbers of the key chunks, (R, K, w) int64.

        Entry [r, k] has the w numbers of the key chunk at offsets[k] from query chunk r. They may
        be outside the grid. R: number of chunks along the axis.
        """
        count = self.chunks[axis]
        chunk = torch.arange(count, device=device)
        if self.cyclic:  # roll, because ONNX cannot compute the remainder by a dynamic size
            near = torch.stack([chunk.roll(1), chunk, chunk.roll(-1)], dim=1)
        else:
            near = chunk[:, None] + torch.arange(-1, 2, device=device)
        steps = make_offsets(self.offsets, device)[:, axis] + 1
        first = near.index_select(1, steps) * self.size
        return first[..., None] + torch.arange(self.size, device=device)
