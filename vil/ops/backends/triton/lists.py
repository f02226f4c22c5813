"""Functions of the kernels for a pattern's layout: find the listed tokens, add bias and masks.

A layout gives each query chunk a list of key chunks, of any length (vil/ops/layout.py). A program
processes its list as one sequence of blocks of tokens, so that the loads of a chunk can overlap
with the matmuls of the previous chunk. The argument `lists` is a `Lists` of layouts.py.

Shapes: Y columns of the grid, w chunk side, W = w*w tokens of a chunk.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def corner(chunk, w, Y):
    """Return the first row and the first column of the chunk with index `chunk` (row-major).

    w: side of a chunk. Y: columns of the grid.
    """
    across = tl.cdiv(Y, w)
    return chunk // across * w, chunk % across * w


@triton.jit
def list_blocks(lists, head, line, w, BLOCK: tl.constexpr):
    """Return (first, end, blocks): one list of chunks has the blocks `first` to `end` - 1.

    Each chunk is divided into `blocks` blocks of BLOCK tokens. The blocks of all lists of all
    heads are numbered consecutively. line: index of the list among the lists of the head.
    """
    start = lists.starts + head * lists.stride + line
    blocks = tl.cdiv(w * w, BLOCK)
    return tl.load(start) * blocks, tl.load(start + 1) * blocks, blocks


@triton.jit
def chunk_places(chunk, first, rows, cols, Y, w, BLOCK: tl.constexpr):
    """Return (row, col, place, token, exists) of BLOCK consecutive tokens of a chunk.

    first: the `place` of the first token.
    row, col: the row and column of each token in the grid.
    place: row-major index of each token in the chunk.
    token: row-major index of each token in the grid; 0 if the token does not exist.
    exists: False for tokens outside of rows x cols, and beyond the end of the chunk. Beyond the end
    of the chunk, row, col and place are those of the chunk's first token.
    """
    x0, y0 = corner(chunk, w, Y)
    place = first + tl.arange(0, BLOCK)
    inside = place < w * w
    place = tl.where(inside, place, 0)
    row, col = x0 + place // w, y0 + place % w
    exists = inside & (row < rows) & (col < cols)
    return row, col, place, tl.where(exists, row * Y + col, 0), exists


@triton.jit
def listed_tokens(lists, number, blocks, rows, cols, Y, w, BLOCK: tl.constexpr):
    """Return (row, col, first, token, exists, mask) of one block of tokens in a list of chunks.

    number: number of the block, in the range that `list_blocks` returns. blocks: blocks per chunk.
    row, col: the row and column of each token in the grid.
    first: row-major index of the block's first token in its chunk.
    token: row-major index of each token in the grid.
    exists: False for padding.
    mask: index of a mask in `lists.tiles`; negative for no mask. It masks the scores between this
    block's chunk and the chunk that has the list.
    """
    pair = number // blocks
    chunk, mask = tl.load(lists.chunks + pair), tl.load(lists.masks + pair)
    first = number % blocks * BLOCK
    row, col, _, token, exists = chunk_places(chunk, first, rows, cols, Y, w, BLOCK)
    return row, col, first, token, exists, mask


@triton.jit
def head_table(TABLE, head, reach_rows, reach_cols):
    """Return a pointer to the middle of a head's bias table, the entry of displacement (0, 0)."""
    wide = 2 * reach_cols + 1
    return TABLE + head * (2 * reach_rows + 1) * wide + reach_rows * wide + reach_cols


@triton.jit
def add_bias(score, TABLE, row, col, key_row, key_col, reach_rows, reach_cols):
    """Add the relative position bias to the scores.

    TABLE: a pointer to the entry of displacement (0, 0), see `head_table`.
    row, col: positions of the queries in the grid. key_row, key_col: positions of the keys. All
    four must broadcast to the shape of the scores.
    reach_rows, reach_cols: largest displacement in the table.
    """
    wide = 2 * reach_cols + 1
    return score + tl.load(TABLE + ((row * wide + col) - (key_row * wide + key_col)))


@triton.jit
def show(score, lists, mask, place, first, w, BLOCK: tl.constexpr):
    """Set masked scores to -inf. The scores are between some tokens of two chunks A and B.

    A is the query chunk and B the key chunk, or the reverse.
    score: one row for each token of A in `place`, one column for each of BLOCK tokens of B.
    place: row-major indices of the tokens in A.
    first: row-major index in B of the first column's token. BLOCK divides 64.
    mask: index of the mask in `lists.tiles`; negative for no mask. A mask is (W, ceil(W / 64))
    int64. Each row is a token of A, and has a bit for each token of B.
    """
    words = tl.cdiv(w * w, 64)
    at = tl.maximum(mask, 0).to(tl.int64) * (w * w * words) + place * words + first // 64
    bits = tl.load(lists.tiles + at, mask=(place >= 0) & (mask >= 0), other=-1) >> (first % 64)
    if BLOCK <= 32:
        bits = bits.to(tl.int32)
    visible = (bits[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1
    return tl.where(visible != 0, score, NOTHING)
