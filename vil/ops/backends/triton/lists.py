"""Layouts of patterns in kernels: lists of chunks, the masks of their pairs, and their bias.

A layout gives each chunk of queries a list of key chunks, of any length (vil/ops/layout.py). A
program walks its list as one sequence of blocks of tokens, so that the loads of a chunk can overlap
with the matmuls of the chunk before it.

Shapes: N heads, X rows and Y columns of the grid, w chunk side, W = w*w tokens of a chunk, Q and K
tokens of a block of queries and of keys, T masks. `lists` is a `Lists` of layouts.py.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def corner(chunk, w, Y):
    """Return the first row and column of a chunk in the grid."""
    across = tl.cdiv(Y, w)
    return chunk // across * w, chunk % across * w


@triton.jit
def list_blocks(lists, head, line, w, BLOCK: tl.constexpr):
    """Return (first, end, blocks) of a list of chunks: the number of its first block, the number of
    the block after its last, and the number of blocks per chunk.

    line: number of the list. A block has BLOCK tokens. Blocks are numbered over all lists.
    """
    start = lists.starts + head * lists.stride + line
    blocks = tl.cdiv(w * w, BLOCK)
    return tl.load(start) * blocks, tl.load(start + 1) * blocks, blocks


@triton.jit
def chunk_places(chunk, first, rows, cols, Y, w, BLOCK: tl.constexpr):
    """Return (row, col, place, token, exists) of BLOCK tokens of a chunk, from place `first` on.

    row, col: position in the grid. place: position in the chunk, row-major. token: number in the
    grid; 0 for a lane whose token does not exist, because it is beyond the chunk, `rows` or `cols`.
    """
    x0, y0 = corner(chunk, w, Y)
    place = first + tl.arange(0, BLOCK)
    row, col = x0 + place // w, y0 + place % w
    exists = (place < w * w) & (row < rows) & (col < cols)
    return row, col, place, tl.where(exists, row * Y + col, 0), exists


@triton.jit
def listed_tokens(lists, number, blocks, rows, cols, Y, w, BLOCK: tl.constexpr):
    """Return (row, col, place, token, exists, mask) of one block of tokens in listed chunks.

    number: of the block, and `blocks` per chunk, see `list_blocks`. See `chunk_places` for the
    first five results. mask: the index of the mask of the block's pair of chunks.
    """
    pair = number // blocks
    chunk, mask = tl.load(lists.chunks + pair), tl.load(lists.masks + pair)
    row, col, place, token, exists = chunk_places(
        chunk, number % blocks * BLOCK, rows, cols, Y, w, BLOCK
    )
    return row, col, place, token, exists, mask


@triton.jit
def head_table(TABLE, head, w, reach_rows, reach_cols):
    """Return a pointer to the bias table of a head. reach_rows, reach_cols: the largest
    displacement in the table of a layout; None for a window."""
    if reach_rows is None:
        entries = (4 * w - 1) * (4 * w - 1)
    else:
        entries = (2 * reach_rows + 1) * (2 * reach_cols + 1)
    return TABLE + head * entries


@triton.jit
def pattern_scores(
    score, TABLE, lists, mask, row, col, key_row, key_col, place, key_place, exists,
    w, reach_rows, reach_cols,
):  # fmt: skip
    """Add the bias of the displacement to the scores, and set hidden scores to -inf.

    Queries may be along either dimension of the scores. row, col, key_row, key_col: positions in
    the grid. place, key_place: positions in the chunks. mask: the index of the pair's mask in
    lists.tiles (T, W, W), below 0 if all pairs of its tokens are visible. Displacements beyond
    reach_rows and reach_cols are clamped to them.
    """
    if TABLE is not None:
        down = tl.minimum(tl.maximum(row - key_row, -reach_rows), reach_rows) + reach_rows
        right = tl.minimum(tl.maximum(col - key_col, -reach_cols), reach_cols) + reach_cols
        score += tl.load(TABLE + down * (2 * reach_cols + 1) + right)
    tile = lists.tiles + tl.maximum(mask, 0).to(tl.int64) * w * w * w * w
    at = place * (w * w) + key_place
    visible = tl.load(tile + at, mask=exists & (mask >= 0), other=1)
    return tl.where(exists & (visible != 0), score, NOTHING)
