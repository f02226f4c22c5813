"""Which tokens each program of the Triton kernels reads: the plan of a window or of a layout.

The kernels know nothing of grids, chunks or windows. A program computes a block of rows of the
score matrix, and walks over lists of columns. A plan gives, for each group of rows, its tokens and
its lists of columns. `Plan.bias_index` gives the bias of each row and column, or their mask. All of
it is computed once on the CPU and cached on the device, because a copy to the device synchronizes,
and a CUDA graph cannot capture it.

In the plan of the forward pass, rows are queries and columns are keys. In a transposed plan, for
the gradients of keys and values, rows are keys and columns are queries.

Most groups of a window differ only in their position on the grid. So tokens are stored as offsets
from the first token of a group, once for all groups with the same surroundings. These form a case,
for example the interior of the grid, an edge or a corner. The columns of a case are those tokens
that exist and that a row of the group attends to, so no program reads padding.

Shapes: X Y grid rows and columns, w chunk side, W = w*w tokens of a chunk, G global tokens, R rows
of a group and C columns of a list (both padded, see `pad`), S sets of offsets, T tiles,
E entries of a bias table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.layout import FULL, Layout
from vil.ops.window import Mask, Window
from vil.utils.transforms import untraced

P = ParamSpec("P")
T = TypeVar("T")

BLOCK = 64  # the largest number of rows or columns that a program takes at a time
GLOBAL = 1 << 30  # an offset of GLOBAL + g stands for the global token g, wherever the group is
# bytes of the tiles of a window in 16 bits, for one head, above which all cases share the tile of
# the interior, and columns that do not exist at an edge are masked instead
MAX_TILE_BYTES = 2 << 20


class Lists(NamedTuple):
    """The tensors of a plan that say which tokens to read, int32.

    row_base, row_set (groups,): the first token of a group, and its set of rows.
    rows (S, R): the tokens of each set of rows, relative to the first token; -1 for no token.
    spans (heads * groups * ceil(R / BLOCK), 2): the columns of BLOCK rows, from a first column to
    an end, both multiples of BLOCK or of C. heads is 1 if all heads have the same lists.
    pair_base, pair_set, pair_tile (pairs,): a list of columns: the token that its offsets are
    relative to, its set of columns, and the tile of its biases. In the plan of a window, each group
    has one list. In the plan of a layout, each attended chunk is a list, and `spans` numbers the
    columns of all lists consecutively.
    columns (S, C): the tokens of each set of columns, relative to the base of a list.
    """

    row_base: Tensor
    row_set: Tensor
    rows: Tensor
    spans: Tensor
    pair_base: Tensor
    pair_set: Tensor
    pair_tile: Tensor
    columns: Tensor


class Plan(NamedTuple):
    """Which columns each group of rows attends to, with which biases.

    head_stride: number of groups if heads have different lists, else 0.
    bias_index (T, R, C) int32: the index of the bias of each row and column of a tile, below
    `masked`: first the table, then the biases toward global tokens. `masked` for pairs that are not
    attended or do not exist.
    masked: E + G.
    has_mask: whether a row does not attend to some columns of its lists that exist.
    exists (S, C) float32: 0 for the columns of each set that exist, -inf for the others.
    shares_tile: whether tiles do not mask columns that do not exist.
    items (I, 4) int32: (row_base, row_set, pair_base, pair_set) of each group of rows and list of
    columns, sorted by head and tile.
    item_starts (heads * T + 1,) int32: the first item of each head and tile, and the end.
    """

    lists: Lists
    groups: int
    head_stride: int
    is_layout: bool
    bias_index: Tensor
    masked: int
    has_mask: bool
    exists: Tensor
    shares_tile: bool
    items: Tensor
    item_starts: Tensor


def cache_on_device(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to cache its last results, tensors that kernels read.

    Results that a CUDA graph captures are kept forever, because the graph reads them again.
    """
    compute, captured = lru_cache(maxsize=128)(untraced(function)), {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result = compute(*args, **kwargs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            captured[id(result)] = result
        return result

    return call


@cache_on_device
def make_plan(
    window: Window | Layout,
    num_global: int,
    has_table: bool,
    transposed: bool = False,
    device: str = "cpu",
) -> Plan:
    """Return the plan of a window or a layout.

    has_table: whether there is a relative position bias. Without it, pairs of chunks of a layout
    share a tile if they have the same mask. transposed: rows are keys and columns are queries. Such
    a plan has no global tokens.
    """
    if device != "cpu":
        plan = make_plan(window, num_global, has_table, transposed)
        fields = plan._asdict().items()
        moved: dict[str, Any] = {name: x.to(device) for name, x in fields if torch.is_tensor(x)}
        return plan._replace(lists=Lists(*(x.to(device) for x in plan.lists)), **moved)
    masked = window.table_entries + num_global
    num_global = 0 if transposed else num_global
    if isinstance(window, Layout):
        return _plan_layout(window, num_global, masked, has_table, transposed)
    return _plan_window(window, num_global, masked, transposed)


def pad(size: int) -> int:
    """Round up to a multiple of BLOCK. Below BLOCK, round up to a power of two, at least 16."""
    return max(16, next_power_of_2(size)) if size < BLOCK else -(-size // BLOCK) * BLOCK


def group_chunks(window: Window) -> tuple[int, int]:
    """Return how many rows and columns of chunks form a group. It is the number with the fewest
    scores per row, where padding counts too: more than one for chunks of few tokens."""
    reach = [max(steps) - min(steps) for steps in zip(*window.offsets)]
    most = max(1, BLOCK // window.tile)

    def count_scores(group: tuple[int, int]) -> float:
        rows = math.prod(group) * window.tile
        columns = math.prod(n + more for n, more in zip(group, reach)) * window.tile
        return pad(rows) * pad(columns) / rows

    groups = ((r, c) for r in range(1, most + 1) for c in range(r, most // r + 1))
    return min(groups, key=count_scores)


class _Axis(NamedTuple):
    """Groups along the rows or columns of the grid: the first line of each group, its case, and
    the first line of one group of each case."""

    first: np.ndarray
    case: np.ndarray
    examples: np.ndarray

    @classmethod
    def divide(cls, size: int, side: int, w: int) -> _Axis:
        """Divide `size` lines into groups of `side`. Groups with the same case have equally many
        lines, and equally many of the w lines before and after them are in the grid."""
        first = np.arange(0, size, side)
        around = np.stack([np.minimum(first, w), np.minimum(size - first, side + w)], 1)
        _, examples, case = np.unique(around, axis=0, return_index=True, return_inverse=True)
        return cls(first, case.reshape(-1), first[examples])


class _Lines(NamedTuple):
    """One axis of a group: its `side` lines, and the side + 2w lines around them as columns.

    row_exists (side,), exists (side + 2w,): whether a line is in the grid.
    position (side + 2w,): the lines, relative to the group's first line. Cyclic windows wrap them.
    step (side, side + 2w): the displacement in chunks from query to key, plus 1.
    near (side, side + 2w): whether the step is -1 to 1 and the exact window reaches the key.
    bias (side, side + 2w): the row or column of the bias table.
    """

    row_exists: np.ndarray
    exists: np.ndarray
    position: np.ndarray
    step: np.ndarray
    near: np.ndarray
    bias: np.ndarray

    @classmethod
    def around(cls, window: Window, axis: int, side: int, first: int | None, transposed: bool):
        """first: the first line of the group; None for a group far from the edges of the grid."""
        w, size = window.size, window.grid[axis]
        row, column = np.arange(side)[:, None], np.arange(-w, side + w)
        position, row_exists = column, np.ones(side, dtype=bool)
        exists = np.ones(len(column), dtype=bool)
        if first is not None:
            lines = first + column
            if window.cyclic:
                lines = lines % (window.chunks[axis] * w)
            position, exists = lines - first, (lines >= 0) & (lines < size)
            row_exists = first + row[:, 0] < size
        sign = -1 if transposed else 1
        step, distance = sign * (column // w - row // w), sign * (row - column)
        reach = w if window.mask == Mask.EXACT else 2 * w - 1
        near = (abs(step) <= 1) & (abs(distance) <= reach)
        step, bias = np.clip(step, -1, 1) + 1, np.clip(distance, 1 - 2 * w, 2 * w - 1) + 2 * w - 1
        return cls(row_exists, exists, position, step, near, bias)


class _Case(NamedTuple):
    """The rows and columns of the groups of a case.

    rows: tokens of the rows, relative to the first; -1 outside of the grid. columns, exists: tokens
    of the columns, and whether they exist. bias (rows, columns): as `Plan.bias_index`, -1 where a
    row does not exist or does not attend to a column.
    """

    rows: np.ndarray
    columns: np.ndarray
    exists: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, window: Window, sides: tuple[int, int], corner: tuple, transposed: bool) -> _Case:
        """sides: lines of a group. corner: its first row and column; None far from the edges."""
        x, y = (
            _Lines.around(window, axis, sides[axis], corner[axis], transposed) for axis in (0, 1)
        )
        grid_cols = window.grid[1]
        exists = np.logical_and.outer(x.row_exists, y.row_exists).reshape(-1)
        rows = np.add.outer(np.arange(sides[0]) * grid_cols, np.arange(sides[1])).reshape(-1)
        columns = np.add.outer(x.position * grid_cols, y.position).reshape(-1)
        attended = np.zeros((3, 3), dtype=bool)
        attended[tuple(np.array(window.offsets).T + 1)] = True

        def cross(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return a[:, None, :, None], b[None, :, None, :]

        seen = np.logical_and(*cross(x.near, y.near)) & attended[cross(x.step, y.step)]
        bias_row, bias_col = cross(x.bias, y.bias)
        bias = np.where(seen, bias_row * (4 * window.size - 1) + bias_col, -1)
        bias = bias.reshape(len(rows), len(columns))
        bias[~exists] = -1
        columns_exist = np.logical_and.outer(x.exists, y.exists).reshape(-1)
        return cls(np.where(exists, rows, -1), columns, columns_exist, bias)


def _plan_window(window: Window, num_global: int, masked: int, transposed: bool) -> Plan:
    """Return the plan of a window, on the CPU. Each case has a set of rows and one of columns."""
    down, across = group_chunks(window)
    sides = (down * window.size, across * window.size)
    axes = [_Axis.divide(n, side, window.size) for n, side in zip(window.grid, sides)]
    corners = [(x, y) for x in axes[0].examples for y in axes[1].examples]
    cases = [_Case.of(window, sides, corner, transposed) for corner in corners]
    height = pad(math.prod(sides))
    kept = [case.exists & (case.bias >= 0).any(0) for case in cases]
    width = pad(num_global + max(int(keep.sum()) for keep in kept))
    tiles = cases
    if shares_tile := len(cases) * height * width * 2 > MAX_TILE_BYTES:
        tiles = [_Case.of(window, sides, (None, None), transposed)]
        kept = [(tiles[0].bias >= 0).any(0)] * len(cases)
        width = pad(num_global + int(kept[0].sum()))

    bias_index = np.full((len(tiles), height, width), masked)
    bias_index[:, : math.prod(sides), :num_global] = window.table_entries + np.arange(num_global)
    for index, tile, keep in zip(bias_index, tiles, kept):
        bias = tile.bias[:, keep]
        part = index[: len(bias), num_global : num_global + bias.shape[1]]
        part[:] = np.where(bias < 0, masked, bias)
    rows, columns = np.full((len(cases), height), -1), np.zeros((len(cases), width))
    parts = -(-height // BLOCK)
    exists, spans = np.full((len(cases), width), -np.inf), np.zeros((len(cases), parts, 2))
    columns[:, :num_global], exists[:, :num_global] = GLOBAL + np.arange(num_global), 0
    has_mask = False
    for number, (case, keep) in enumerate(zip(cases, kept)):
        local = slice(num_global, num_global + int(keep.sum()))
        rows[number, : len(case.rows)] = case.rows
        columns[number, local] = np.where(case.exists, case.columns, 0)[keep]
        exists[number, local] = np.where(case.exists, 0, -np.inf)[keep]
        seen = (case.bias >= 0) & case.exists
        has_mask |= bool((~seen[case.rows >= 0][:, keep & case.exists]).any())
        used = np.zeros((height, width), dtype=bool)
        used[: len(seen), local] = seen[:, keep]
        used[:, :num_global] = True
        step = min(width, BLOCK)
        used = np.any(used.reshape(parts, height // parts, width // step, step), axis=(1, 3))
        first, end = used.argmax(1), used.shape[1] - used[:, ::-1].argmax(1)
        spans[number] = np.where(used.any(1), [first, end], 0).T * step

    case = np.add.outer(axes[0].case * len(axes[1].examples), axes[1].case).reshape(-1)
    base = np.add.outer(axes[0].first * window.grid[1], axes[1].first).reshape(-1)
    tile = np.zeros_like(case) if shares_tile else case
    lists = (base, case, rows, spans[case], base, case, tile, columns)
    items, item_starts = _sort_items(np.stack([base, case, base, case], 1), tile, len(tiles))
    return Plan(
        Lists(*map(_int32, lists)), len(base), 0, False, _int32(bias_index), masked, has_mask,
        torch.from_numpy(exists).float(), shares_tile, items, item_starts,
    )  # fmt: skip


def _plan_layout(
    layout: Layout, num_global: int, masked: int, has_table: bool, transposed: bool
) -> Plan:
    """Return the plan of a layout, on the CPU. A group of rows is a chunk.

    Chunks at the bottom or right of the grid may be incomplete. So there are four sets of tokens,
    and a fifth for the global tokens.
    """
    (grid_rows, grid_cols), w = layout.grid, layout.size
    (chunk_rows, chunk_cols), lists = layout.chunks, layout.lists
    chunks = chunk_rows * chunk_cols
    height, width = pad(layout.tile), pad(max(layout.tile, num_global))
    down, right = np.divmod(np.arange(layout.tile), w)
    heights, widths = (w, grid_rows - (chunk_rows - 1) * w), (w, grid_cols - (chunk_cols - 1) * w)
    there = np.stack([(down < h) & (right < c) for h in heights for c in widths])
    rows, columns = np.full((4, height), -1), np.zeros((5, width))
    exists = np.full((5, width), -np.inf)
    rows[:, : layout.tile] = np.where(there, down * grid_cols + right, -1)
    columns[:4, :height], columns[4, :num_global] = rows.clip(0), GLOBAL + np.arange(num_global)
    exists[:4, :height][rows >= 0], exists[4, :num_global] = 0, 0
    chunk_row, chunk_col = np.divmod(np.arange(chunks), chunk_cols)
    token_set = 2 * (chunk_row == chunk_rows - 1) + (chunk_col == chunk_cols - 1)
    base = (chunk_row * grid_cols + chunk_col) * w

    # pairs of chunks share a tile if they have the same biases and masks
    head, query, key, mask = (x.numpy() for x in (lists.head, lists.query, lists.key, lists.mask))
    steps = [(at[query] - at[key]) * int(has_table) for at in (chunk_row, chunk_col)]
    alike = np.stack([*steps, mask, token_set[query], token_set[key]], 1)
    kinds, tile = np.unique(alike, axis=0, return_inverse=True)
    bias_index = np.full((len(kinds) + bool(num_global), height, width), masked)
    for index, (step_row, step_col, number, query_set, key_set) in zip(bias_index, kinds):
        seen = there[query_set][:, None] & there[key_set]
        if number != FULL:
            seen &= lists.masks[number].numpy()
        displacement = (
            torch.from_numpy(step * w + at[:, None] - at)
            for step, at in ((step_row, down), (step_col, right))
        )
        bias = layout.bias_index(*displacement).numpy()
        index[: layout.tile, : layout.tile] = np.where(seen, bias, masked)
    if transposed:
        bias_index, query, key = bias_index.transpose(0, 2, 1), key, query
    pairs = [head, query, base[key], token_set[key], tile.reshape(-1)]
    if num_global:  # each chunk also has a list of the global tokens
        bias_index[-1, : layout.tile, :num_global] = layout.table_entries + np.arange(num_global)
        of_head, of_group = np.indices((layout.heads, chunks)).reshape(2, -1)
        zero = np.zeros_like(of_head)
        more = [of_head, of_group, zero, zero + 4, zero + len(kinds)]
        pairs = [np.concatenate(both) for both in zip(more, pairs)]
    order = np.lexsort((pairs[1], pairs[0]))  # by head, then by group of rows
    head, group, pair_base, pair_set, tile = (x[order] for x in pairs)
    starts = np.searchsorted(head * chunks + group, np.arange(layout.heads * chunks + 1)) * width
    spans = np.stack([starts[:-1], starts[1:]], 1)[:, None].repeat(-(-height // BLOCK), 1)
    tensors = (base, token_set, rows, spans, pair_base, pair_set, tile, columns)
    items = np.stack([base[group], token_set[group], pair_base, pair_set], 1)
    tiles = len(bias_index)
    items, item_starts = _sort_items(items, head * tiles + tile, layout.heads * tiles)
    return Plan(
        Lists(*map(_int32, tensors)), chunks, chunks if layout.heads > 1 else 0, True,
        _int32(bias_index), masked, bool((lists.mask != FULL).any()),
        torch.from_numpy(exists).float(), False, items, item_starts,
    )  # fmt: skip


def _sort_items(items: np.ndarray, tile: np.ndarray, tiles: int) -> tuple[Tensor, Tensor]:
    """Sort items by their tile. Returns them and the first item of each tile, with the end."""
    order = np.argsort(tile, kind="stable")
    return _int32(items[order]), _int32(np.searchsorted(tile[order], np.arange(tiles + 1)))


def _int32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x).astype(np.int32))
