"""Block lists, masks and bias of a window or a layout, in the form that FlexAttention needs.

Shapes: B batch, N heads, h = B*N, L tokens, W = w*w tokens of a chunk, P tokens of a block, M query
blocks, S key blocks of global tokens, T entries of the bias table, T' masks in
`LayoutBlocks.tiles`. H is N if the block lists differ by head, else 1.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case, next_power_of_2
from vil.ops.backends.chunk_layout import from_chunks, to_chunks
from vil.ops.call import from_numbers, to_numbers
from vil.ops.layout import FULL, Layout
from vil.ops.window import Mask, Window, real_cells
from vil.utils.transforms import untraced

FEWEST_BLOCKS = 16  # below it, empty blocks cost less than another compilation
NO_REACH = (0, 0)  # of a table with one entry, for layouts without a table

Some = Tensor | None
Lists = tuple[Tensor, Tensor, Some, Some, Some, Some, Some, Some]


class WindowBlocks(NamedTuple):
    """A window as tensors for FlexAttention: M query blocks and S+M key blocks of P tokens each.

    The first S key blocks have the global keys. Biases are in another tensor, `added` (h, S*P + T),
    where h = images * heads. A row has the bias of each global key, then the T entries of the bias
    table. The bias of a query and a local key is added[:, base + code(query) - code(key)].

    base (M, S+M) int32: `base` in this formula for each query block and key block; -1 if no query
    of the query block attends to the key block.
    code (P) int32: `code` in this formula for each token of a w x w chunk, (4w-1) * row + column.
    near (S*P + T) bool: whether the exact mask lets a query attend, for each column of `added`.
    True for global keys, and for displacements of at most w rows and columns. None for other masks.
    real (h, (S+M)*P) bool: whether a key is not padding.
    lists: eight arguments of FlexAttention's BlockMask: counts and indices, for each of four lists.
    List 1 has the key blocks of each query block that need a mask. List 2 has those that need none.
    Lists 3 and 4 have, in the same way, the query blocks of each key block, for the backward pass.
    Tensors that are not needed are None.
    """

    base: Tensor
    code: Tensor
    near: Tensor | None
    real: Tensor
    lists: Lists


class LayoutBlocks(NamedTuple):
    """A layout as tensors for FlexAttention: M query blocks and S+M key blocks of P tokens each.

    The first S key blocks have the global keys. H is the number of heads if their patterns differ,
    else 1.

    masks (H, M, S+M) int32: the mask of each query block and key block, as an index into `tiles`.
    tiles (T', W, W) bool: masks of pairs of chunks of W tokens: the masks of the layout, then an
    all-True mask, then all-False masks.
    rows, cols (M*P) int32: the position of each query in the grid.
    reach: the largest displacement (rows, columns) in the bias table.
    real (images * heads, (S+M)*P) bool: whether a key is not padding.
    lists: as in `WindowBlocks`, for each of the H heads.
    """

    masks: Tensor
    tiles: Tensor
    rows: Tensor
    cols: Tensor
    reach: tuple[int, int]
    real: Tensor
    lists: Lists


def block_size(window: Window | Layout, device: str, backward: bool) -> int:
    """Return P, the number of tokens in a block.

    It is the number of tokens in a chunk, rounded up to a multiple of the block size of
    FlexAttention's kernels.
    backward: whether FlexAttention's backward pass also runs.
    """
    step = 16 if device == "cpu" else 128 if backward else 64
    return math.ceil(window.tile / step) * step


def num_blocks(window: Window | Layout) -> int:
    """Return M, the number of query blocks: the number of chunks, rounded up to a power of two.

    M is at least FEWEST_BLOCKS. The kernels skip empty blocks.
    """
    return max(FEWEST_BLOCKS, next_power_of_2(math.prod(window.chunks)))


def num_first(num_global: int, block: int) -> int:
    """Return S, the number of key blocks that are reserved for global tokens.

    block: number of tokens in a block. S is at least 1, so that calls without global tokens share a
    compiled kernel with other calls.
    """
    return max(1, math.ceil(num_global / block))


def has_full(window: Window | Layout, block: int) -> bool:
    """Return whether some pairs of a query block and a key block can be computed without a mask.

    Every pair needs a mask if chunks are padded to blocks, or if the window has the exact mask.
    block: number of tokens in a block.
    """
    is_exact = isinstance(window, Window) and window.mask == Mask.EXACT
    return window.tile == block and not is_exact


def num_tiles(layout: Layout) -> int:
    """Return the number of masks in `LayoutBlocks.tiles`.

    It is the layout's number of distinct masks, plus 2 for an all-True and an all-False mask,
    rounded up to a power of two.
    """
    return _count_tiles(*to_numbers(layout, 0))


@torch.compiler.assume_constant_result
def _count_tiles(*numbers: int) -> int:
    """Compute `num_tiles` of a layout that `to_numbers` encoded as `numbers`.

    torch.compile treats the result as a constant, because it cannot trace how a layout builds its
    lists of chunks.
    """
    layout, _ = from_numbers(numbers)
    # pyrefly: ignore[missing-attribute]  # the numbers are those of a layout
    return next_power_of_2(len(layout.lists.masks) + 2)


def table_reach(case: Case) -> tuple[int, int]:
    """Return the largest displacement (rows, columns) in a layout's bias table.

    Returns NO_REACH without a bias table.
    """
    window = case.window
    return window.table_reach if case.table_bias and isinstance(window, Layout) else NO_REACH


def widths(case: Case, block: int) -> tuple[int, int]:
    """Return (S*P, T), the lengths of the two parts of a row of `added` (see `WindowBlocks`).

    The first part has the biases of global keys. The second part has the bias table. block: P, the
    number of tokens in a block. For a window, T is the table length of the largest window whose
    chunks fit into a block, so that windows of different sizes share a compiled kernel.
    """
    first = num_first(case.num_global, block) * block
    if not case.is_layout:
        return first, (4 * math.isqrt(block) - 1) ** 2
    rows, cols = table_reach(case)
    return first, (2 * rows + 1) * (2 * cols + 1)


def to_blocks(x: Tensor, window: Window | Layout, size: int) -> Tensor:
    """Reorder tokens (B, N, L, ..) to M zero-padded blocks of P = `size` tokens, (B*N, 1, M*P, ..).

    The first blocks have the tokens of one chunk each. The remaining blocks are zero.
    """
    x = to_chunks(x, window).flatten(2, 3).flatten(0, 1)  # (h, chunks, W, ..)
    x = F.pad(x, (0, 0, 0, size - window.tile, 0, num_blocks(window) - x.shape[1]))
    return x.flatten(1, 2)[:, None]


def from_blocks(x: Tensor, window: Window | Layout, lead: torch.Size) -> Tensor:
    """Reverse `to_blocks`: reorder M blocks of P tokens to (B, N, L, ..).

    x: (B*N, 1, M*P, ..) or (B, N, M*P, ..). lead: the shape (B, N).
    """
    x = x.flatten(0, 1).unflatten(1, (num_blocks(window), -1))
    x = x[:, : math.prod(window.chunks), : window.tile]
    return from_chunks(x.unflatten(1, window.chunks).unflatten(0, lead), window)


def make_blocks(
    case: Case, size: int, valid_hw: Tensor | None, device: torch.device
) -> WindowBlocks | LayoutBlocks:
    """Return the window or layout of a case as tensors for FlexAttention.

    size: P, the number of tokens in a block.
    """
    window = case.window
    if isinstance(window, Layout):
        return _layout_blocks(case, window, size, valid_hw, device)
    return _window_blocks(case, window, size, valid_hw, device)


def _window_blocks(
    case: Case, window: Window, size: int, valid_hw: Tensor | None, device: torch.device
) -> WindowBlocks:
    """Return the window of a case as tensors for FlexAttention.

    size: P, the number of tokens in a block. The tensors are not cached, because building them
    takes only a few small operations.
    """
    first, width = widths(case, size)
    side, inside = 4 * window.size - 1, torch.arange(window.size, device=device)
    code = (inside[:, None] * side + inside).flatten()
    near = None
    if window.mask == Mask.EXACT:
        line = (torch.arange(side, device=device) - (2 * window.size - 1)).abs() <= window.size
        near = (line[:, None] & line).flatten()
        near = F.pad(F.pad(near, (0, width - len(near))), (first, 0), value=True)
    real = _real(case, size, valid_hw, device)
    base = _base(window, case.num_global, size, device)
    seen = (base >= 0)[None]
    full = seen & _all_real(real, base.shape[1]) if has_full(window, size) else None
    lists = _lists(seen, full, case.needs_grad)
    return WindowBlocks(base, F.pad(code, (0, size - window.tile)).int(), near, real, lists)


def _base(window: Window, num_global: int, size: int, device: torch.device) -> Tensor:
    """Return `WindowBlocks.base` (M, S+M) int32, for M query blocks and S+M key blocks.

    An entry is -1 if the query block does not attend to the key block. Otherwise, it is 0 for a
    block of global keys, and the `base` of the formula in `WindowBlocks` for a block of local keys.
    size: number of tokens in a block.
    """
    rows, cols = window.chunks
    first, (count, side) = num_first(num_global, size), (num_blocks(window), 4 * window.size - 1)
    base = torch.full((count, first + count), -1, dtype=torch.int32, device=device)
    base[: rows * cols, : math.ceil(num_global / size)] = 0
    row = torch.arange(rows, device=device)[:, None].expand(rows, cols)
    col = torch.arange(cols, device=device).expand(rows, cols)
    for dx, dy in window.offsets:
        r, c = row + dx, col + dy
        inside = (r >= 0) & (r < rows) & (c >= 0) & (c < cols) | window.cyclic
        start = (2 * window.size - 1 - dx * window.size) * side
        start += 2 * window.size - 1 - dy * window.size + first * size
        key = (first + r % rows * cols + c % cols).reshape(-1, 1)
        local = base[: rows * cols]
        old = local.gather(1, key)
        local.scatter_(1, key, torch.where(inside.reshape(-1, 1), start, old).int())
    return base


def _layout_blocks(
    case: Case, layout: Layout, size: int, valid_hw: Tensor | None, device: torch.device
) -> LayoutBlocks:
    """Return the layout of a case as tensors for FlexAttention.

    size: P, the number of tokens in a block.
    """
    masks, tiles, rows, cols = _layout_tensors(layout, case.num_global, size, device)
    real, hidden = _real(case, size, valid_hw, device), len(layout.lists.masks) + 1
    full = None
    if has_full(layout, size):
        full = (masks == hidden - 1) & _all_real(real, masks.shape[2])
    lists = _lists(masks != hidden, full, case.needs_grad)
    return LayoutBlocks(masks, tiles, rows, cols, table_reach(case), real, lists)


@lru_cache(maxsize=32)
@untraced
def _layout_tensors(
    layout: Layout, num_global: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields masks, tiles, rows and cols of a `LayoutBlocks`.

    size: number of tokens in a block.
    """
    pairs, (first, count) = layout.lists, (num_first(num_global, size), num_blocks(layout))
    full = len(pairs.masks)
    masks = torch.full((layout.heads, count, first + count), full + 1, dtype=torch.int32)
    masks[:, : math.prod(layout.chunks), : math.ceil(num_global / size)] = full
    number = torch.where(pairs.mask == FULL, full, pairs.mask)
    masks[pairs.head, pairs.query, first + pairs.key] = number.int()
    tiles = torch.zeros(num_tiles(layout), layout.tile, layout.tile, dtype=torch.bool)
    tiles[:full], tiles[full] = pairs.masks, True
    rows, cols = layout.chunk_tokens(torch.arange(count))
    tokens = (F.pad(x, (0, size - layout.tile)).flatten().int() for x in (rows, cols))
    rows, cols = (x.to(device) for x in tokens)
    return masks.to(device), tiles.to(device), rows, cols


def _real(case: Case, size: int, valid_hw: Tensor | None, device: torch.device) -> Tensor:
    """Return which keys are not padding: the field `real` of `WindowBlocks` and `LayoutBlocks`.

    The result is a bool tensor (images * heads, tokens of all key blocks). size: number of tokens
    in a block.
    """
    window = case.window
    limit = torch.tensor([window.grid]) if valid_hw is None else valid_hw
    tokens = real_cells(limit.to(device), window.grid).flatten(2)[..., None]
    local = to_blocks(tokens, window, size)[:, 0, :, 0]
    first = torch.arange(widths(case, size)[0], device=device) < case.num_global
    real = torch.cat([first.expand(len(local), -1), local], dim=1)
    return real.expand(case.batch, -1).repeat_interleave(case.heads, dim=0)


def _lists(seen: Tensor, full: Tensor | None, backward: bool) -> Lists:
    """Return the field `lists` of a `WindowBlocks` or a `LayoutBlocks`.

    seen (H, M, S+M) bool: which key blocks to compute for each query block.
    full (H, M, S+M) bool: which of these pairs need no mask; None if all need one.
    backward: whether the backward pass needs its lists.
    """
    parts = (seen, None) if full is None else (seen & ~full, full)
    mirrored = [part.mT if backward and part is not None else None for part in parts]
    # pyrefly: ignore[bad-return]  # two for each of four parts, the first of which is not None
    return tuple(x for part in (*parts, *mirrored) for x in _indices(part))


def _all_real(real: Tensor, count: int) -> Tensor:
    """Return which of `count` key blocks have no padding in any image, (count) bool.

    real (images * heads, tokens of all key blocks) bool: whether a key is not padding.
    """
    return real.unflatten(1, (count, -1)).all(2).all(0)


def _indices(visible: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (counts, columns) of the True entries in each row of `visible` (H, rows, cols) bool.

    counts (1, H, rows) int32: number of True entries in a row. columns (1, H, rows, cols) int32:
    column indices of these entries, then zeros. Returns (None, None) if `visible` is None.
    """
    if visible is None:
        return None, None
    *lead, cols = visible.shape
    rank = torch.where(visible, visible.cumsum(-1) - 1, cols)  # hidden ones go to the extra column
    column = torch.arange(cols, device=visible.device, dtype=torch.int32).expand(visible.shape)
    indices = column.new_zeros(*lead, cols + 1).scatter_(-1, rank, column)[..., :cols].contiguous()
    return visible.sum(-1, dtype=torch.int32)[None], indices[None]


def score_functions(
    blocks: WindowBlocks | LayoutBlocks, added: Tensor | None, size: int, first: int, heads: int
) -> tuple[Callable, Callable]:
    """Return the functions mask_mod and score_mod for FlexAttention.

    added: the bias tensor, see `WindowBlocks`. If it is None, score_mod must not be used.
    size: number of tokens in a block.
    first: number of tokens in the blocks of global keys.
    heads: size of dimension 1 of FlexAttention's query tensor q. The row b * heads + n of `added`
      and of `blocks.real` belongs to q[b, n].
    """
    if isinstance(blocks, LayoutBlocks):
        visible, bias_index = _layout_functions(blocks, size, first)
    else:
        visible, bias_index = _window_functions(blocks, size, first)

    def shown(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return blocks.real[b * heads + head, key] & visible(head, query, key)

    def biased(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # pyrefly: ignore[unsupported-operation]  # not used without a bias
        return score + added[b * heads + head, bias_index(query, key)]

    return shown, biased


def _window_functions(blocks: WindowBlocks, size: int, first: int) -> tuple[Callable, Callable]:
    """Return the functions visible(head, query, key) and bias_index(query, key) of a window.

    `visible` returns whether the query attends to the key. `bias_index` returns the index of their
    bias in a row of the bias tensor, see `WindowBlocks`. size: tokens per block. first: tokens in
    the blocks of global keys.
    """

    def bias_index(query: Tensor, key: Tensor) -> Tensor:
        """Return, for a query and a visible key, the index of their bias in a row of the bias
        tensor."""
        start = blocks.base[query // size, key // size]
        local = start + blocks.code[query % size] - blocks.code[key % size]
        return torch.where(key < first, key, local.clamp(min=0))

    def visible(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = blocks.base[query // size, key // size] >= 0
        return near if blocks.near is None else near & blocks.near[bias_index(query, key)]

    return visible, bias_index


def _layout_functions(blocks: LayoutBlocks, size: int, first: int) -> tuple[Callable, Callable]:
    """Return the functions visible(head, query, key) and bias_index(query, key) of a layout.

    The results and the arguments have the same meaning as in `_window_functions`.
    """
    (top, left), last = blocks.reach, blocks.tiles.shape[1] - 1  # the last token of a chunk

    def bias_index(query: Tensor, key: Tensor) -> Tensor:
        """Return, for a query and a key, the index of their bias in a row of the bias tensor."""
        local = (key - first).clamp(min=0)
        rows = (blocks.rows[query] - blocks.rows[local]).clamp(-top, top) + top
        cols = (blocks.cols[query] - blocks.cols[local]).clamp(-left, left) + left
        return torch.where(key < first, key, first + rows * (2 * left + 1) + cols)

    def visible(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        tile = blocks.masks[head, query // size, key // size]
        return blocks.tiles[tile, (query % size).clamp(max=last), (key % size).clamp(max=last)]

    return visible, bias_index
