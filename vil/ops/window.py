"""Who may see whom: the 2-D window of local attention, its neighbour modes and its masks.

Letters: B images, N heads, X Y grid rows and columns, w chunk side, W = w*w tokens of a chunk, R C
rows and columns of the chunk grid (R = ceil(X / w)), K number of offsets.

The grid is cut into chunks of w x w tokens. A query sees chunks at given offsets from its own, its
own always among them (Vision Longformer, arXiv:2103.15358, section 3.1). This file alone knows the
three mask kinds (exact, chunks cut at the border, cyclic) and the neighbour modes (section 3.3,
random shift). All masks are a tile of W x K*W, the same for every chunk, plus what is real along
rows and along columns: never L x L, and cheap enough to be made anew for every grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

ALL_NINE = tuple(product((-1, 0, 1), repeat=2))  # (rows, columns) in chunks, row-major
OWN = (0, 0)
# neighbour mode m is NEIGHBOURS[m - 1]
NEIGHBOURS = tuple(offset for offset in ALL_NINE if offset != OWN)
KINDS = {1: "exact", 0: "chunks", -1: "cyclic"}  # the values of SW_EXACT


def mode_offsets(mode: int) -> tuple[tuple[int, int], ...]:
    """Chunk offsets of a mode: 0 all nine, -1 the own chunk, 1..8 the own chunk and a neighbour."""
    if mode == 0:
        return ALL_NINE
    if mode == -1:
        return (OWN,)
    if 1 <= mode <= 8:
        return (OWN, NEIGHBOURS[mode - 1])
    raise ValueError(
        f"mode must be -1 (own chunk), 0 (all nine chunks) or 1..8 (one neighbour), got {mode}"
    )


@dataclass(frozen=True)
class Window:
    """The window of every token of a grid.

    grid: rows and columns of tokens.
    size: w, the chunk side and the one-sided reach of the exact window.
    exact: 1 tokens with |dx|, |dy| <= w; 0 the chunks at `offsets`, cut at the border; -1 the same
    chunks, wrapped around.
    Raises ValueError for sizes below one, an unknown kind, offsets without the own chunk, and the
    exact window with fewer than nine offsets, which would not be exact.
    """

    grid: tuple[int, int]
    size: int
    exact: int = 0
    offsets: tuple[tuple[int, int], ...] = ALL_NINE

    def __post_init__(self) -> None:
        if min(self.grid) < 1 or self.size < 1:
            raise ValueError(
                f"grid and window must be positive, got grid {self.grid}, window {self.size}"
            )
        if self.exact not in KINDS:
            raise ValueError(
                f"exact must be 1 (exact), 0 (chunks) or -1 (cyclic), got {self.exact}"
            )
        distinct = set(self.offsets)
        if (
            OWN not in distinct
            or not distinct <= set(ALL_NINE)
            or len(distinct) < len(self.offsets)
        ):
            raise ValueError(
                f"offsets must be chunk offsets with (0, 0) among them, got {self.offsets}"
            )
        if self.exact == 1 and self.offsets != ALL_NINE:
            raise ValueError(
                "the exact window (exact=1) needs all nine chunks: use mode 0, or exact 0 or -1"
            )

    @classmethod
    def from_mode(cls, grid: tuple[int, int], size: int, exact: int = 0, mode: int = 0) -> Window:
        """The window of a neighbour mode (-1, 0, 1..8)."""
        return cls(grid, size, exact, mode_offsets(mode))

    @property
    def cyclic(self) -> bool:
        return self.exact == -1

    @property
    def symbolic(self) -> bool:
        """Whether the grid has sizes that torch.export left open."""
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
        """(R, C), rows and columns of the chunk grid; the last of each may be partly padding."""
        return tuple((n + self.size - 1) // self.size for n in self.grid)

    def repeats(self) -> bool:
        """Whether a key is met more than once: a cyclic grid of too few chunks."""
        rows, cols = self.chunks
        met = {(dx % rows, dy % cols) for dx, dy in self.offsets}
        return self.cyclic and len(met) < len(self.offsets)

    def without_absent(self) -> Window:
        """The same window less the offsets that lie outside the grid for every chunk."""
        if self.cyclic or self.exact == 1 or self.symbolic:
            return self
        rows, cols = self.chunks
        offsets = tuple(o for o in self.offsets if abs(o[0]) < rows and abs(o[1]) < cols)
        return replace(self, offsets=offsets)

    def bias_index(self, device: torch.device | str = "cpu") -> Tensor:
        """(W, K*W) int64: where the bias of each query and key stands in a table of (4w-1)**2.

        Rows of the table are query row minus key row plus 2w-1, columns likewise (reference order).
        """
        (qx, qy), (kx, ky) = self._tile_positions(device)
        side = 4 * self.size - 1
        return (qx - kx + 2 * self.size - 1) * side + (qy - ky + 2 * self.size - 1)

    def visible(self, valid: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """bool (B or 1, R, C, W or 1, K*W): the keys that exist for the queries of each chunk.

        valid (B, 2): the number of real rows and columns of each image; None: the whole grid.
        """
        rows, cols = self._real(0, valid, device), self._real(1, valid, device)
        real = rows[:, :, None, :, :, None] & cols[:, None, :, :, None, :]
        real = real.flatten(3).unsqueeze(3)
        return real & self.reach(device) if self.exact == 1 else real

    def neighbours(self, device: torch.device | str = "cpu") -> Tensor:
        """(R, C, K*W) int64: the token at each place of the chunks at `offsets`; the nearest one at
        places outside the grid, which `visible` tells."""
        rows, cols = (self._tokens(axis, device).clamp(0, self.grid[axis] - 1) for axis in range(2))
        return (rows[:, None, :, :, None] * self.grid[1] + cols[:, :, None]).flatten(2)

    def reach(self, device: torch.device | str = "cpu") -> Tensor:
        """bool (W, K*W): tile positions at most w rows and w columns apart."""
        (qx, qy), (kx, ky) = self._tile_positions(device)
        return ((qx - kx).abs() <= self.size) & ((qy - ky).abs() <= self.size)

    def _tile_positions(
        self, device: torch.device | str
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Rows and columns of queries (W, 1) and keys (1, K*W), from the query chunk's first."""
        inside = torch.arange(self.size, device=device)
        query = [a.reshape(-1, 1) for a in torch.meshgrid(inside, inside, indexing="ij")]
        shifts = torch.tensor(self.offsets, device=device) * self.size  # (K, 2)
        key_rows = (shifts[:, 0, None, None] + inside[:, None]).expand(-1, self.size, self.size)
        key_cols = (shifts[:, 1, None, None] + inside).expand(-1, self.size, self.size)
        return (query[0], query[1]), (key_rows.reshape(1, -1), key_cols.reshape(1, -1))

    def _real(self, axis: int, valid: Tensor | None, device: torch.device | str) -> Tensor:
        """bool (B or 1, R, K, w): which of `_tokens` exist."""
        token = self._tokens(axis, device)
        real = ((token >= 0) & (token < self.grid[axis]))[None]
        return (
            real if valid is None else real & (token < valid[:, axis, None, None, None].to(device))
        )

    def _tokens(self, axis: int, device: torch.device | str) -> Tensor:
        """(R, K, w) int64: the row (or column) at each line of the chunks at `offsets`."""
        count = self.chunks[axis]
        chunk = torch.arange(count, device=device)
        if self.cyclic:  # rolled and not % count: ONNX has no remainder of an open count
            near = torch.stack([chunk.roll(1), chunk, chunk.roll(-1)], dim=1)
        else:
            near = chunk[:, None] + torch.arange(-1, 2, device=device)
        steps = torch.tensor([offset[axis] + 1 for offset in self.offsets], device=device)
        first = near.index_select(1, steps) * self.size
        return first[..., None] + torch.arange(self.size, device=device)
