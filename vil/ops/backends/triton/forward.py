"""The forward kernel of fused local attention, and functions shared with the backward kernels.

A program computes the output for a block of Q queries of one chunk. Their keys are in this chunk
and its eight neighbors, which form one or several rectangles of tokens. A program reads each
rectangle in row-major order, K keys at a time. Rectangles are clipped to the image without padding.
So masks are needed only at the end of a rectangle and for the exact window. In a cyclic window,
rectangles are wrapped instead of clipped, and padding is masked. For the `Layout` of a pattern,
keys are in listed chunks instead of rectangles (lists.py). The softmax is the online softmax of
FlashAttention (arXiv:2205.14135).

Scores are in base 2: the scale and the biases are multiplied by log2(e), so that the
exponential is a single exp2. LSE, which other backends read, is in base e.

Shapes: N heads, L tokens of the grid of X rows and Y columns, G global tokens, w chunk side, D head
dim (D_PAD: the next power of two, at least 16), Q tokens of a block of queries, K tokens of a block
of keys. MASK is Window.mask: 1 exact, 0 chunks, -1 cyclic.
Arguments q, k, v, out, .. are `Tokens` of launch.py: pointer and strides. For a window, `lists` is
None. For a `Layout`, RECTS and num_rects are None.
TABLE (N, 2*reach_rows + 1, 2*reach_cols + 1) and TO_GLOBAL (N, G) are float32 biases in base 2. The
displacement (0, 0) is in the middle of the table.
"""

import triton
import triton.language as tl

from vil.ops.backends.triton.lists import (
    NOTHING,
    add_bias,
    corner,
    head_table,
    list_blocks,
    listed_tokens,
    show,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# sizes that vary between images: kernels do not specialize on them
SIZES = ["num_rects", "B", "N", "L", "X", "Y", "w", "G", "part", "parts", "splits"]
SIZES += ["top", "left", "height", "width", "cells"]
SIZES += ["first_step", "num_steps", "reach_rows", "reach_cols", "span_rows", "span_cols"]


@triton.jit
def pointers(tokens, image, head, token, D_PAD: tl.constexpr):
    """Return pointers (len(token), D_PAD) to the channels of some tokens of an image and a head.

    tokens: the tensor to point into, as a `Tokens` tuple. token: the indices of the tokens. Memory
    offsets are 64-bit, for large tensors.
    """
    at = tokens.at + image.to(tl.int64) * tokens.image + head.to(tl.int64) * tokens.head
    channel = tl.arange(0, D_PAD).to(tl.int64)
    return at + token.to(tl.int64)[:, None] * tokens.token + channel[None, :] * tokens.channel


@triton.jit
def read(tokens, image, head, token, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the channels of some tokens of an image and a head, (len(token), D_PAD).

    tokens: the tensor to read, as a `Tokens` tuple. token: the indices of the tokens. The channels
    beyond D are 0.
    """
    pointer = pointers(tokens, image, head, token, D_PAD)
    if D == D_PAD:
        x = tl.load(pointer)
    else:
        x = tl.load(pointer, mask=tl.arange(0, D_PAD)[None, :] < D, other=0.0)
    return x


@triton.jit
def write(tokens, image, head, token, exists, value, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store `value` (len(token), D_PAD) as the channels of the tokens where `exists` is True."""
    pointer = pointers(tokens, image, head, token, D_PAD)
    mask = exists[:, None] & (tl.arange(0, D_PAD)[None, :] < D)
    tl.store(pointer, value.to(tokens.at.dtype.element_ty), mask=mask)


@triton.jit
def real_size(VALID_HW, image, X, Y):
    """Return the number of rows and of columns of an image that are not padding."""
    rows, cols = X, Y
    if VALID_HW is not None:
        rows = tl.minimum(tl.load(VALID_HW + 2 * image).to(tl.int32), X)
        cols = tl.minimum(tl.load(VALID_HW + 2 * image + 1).to(tl.int32), Y)
    return rows, cols


@triton.jit
def own_chunk(parts, N, X, Y, w):
    """Return (image, head, part, x0, y0, height, width): the block of tokens of this program.

    part: index of the block in its chunk, below `parts`. x0, y0: first row and column of the chunk.
    height, width: size of the chunk, which may be smaller than w x w at the bottom and right of the
    grid.
    """
    # consecutive programs compute neighboring chunks: keys that they share are in the cache
    number, chunks = tl.program_id(0), tl.cdiv(X, w) * tl.cdiv(Y, w)
    x0, y0 = corner(number // parts % chunks, w, Y)
    image, head = number // (parts * chunks * N), number // (parts * chunks) % N
    return image, head, number % parts, x0, y0, tl.minimum(w, X - x0), tl.minimum(w, Y - y0)


@triton.jit
def chunk_tokens(first, count, width, x0, y0, BLOCK: tl.constexpr):
    """Return (row, column, exists) of BLOCK tokens of a chunk, beginning with token `first`.

    x0, y0: first row and column of the chunk. width: number of columns. count: number of tokens.
    Beyond the last token, `exists` is False, and the position is that of token `first`.
    """
    number = first + tl.arange(0, BLOCK)
    exists = number < count
    number = tl.where(exists, number, first)  # in the tensor, so that loads need no mask
    return x0 + number // width, y0 + number % width, exists


@triton.jit
def rectangle(RECTS, number, x0, y0, row, col, w, rows, cols, MASK: tl.constexpr):
    """Return (first row, first column, width, number of tokens) of a rectangle of tokens.

    RECTS (.., 4) int32: first row, end row, first column and end column of each rectangle, relative
    to the first token (x0, y0) of the program's chunk. number: index of the rectangle. row, col:
    positions of the program's block of tokens.
    The rectangle is clipped to rows x cols and, in an exact window, to distances of at most w from
    the block. In a cyclic window it is not clipped, because `resolve_token` wraps its tokens.
    """
    top, bottom = x0 + tl.load(RECTS + 4 * number), x0 + tl.load(RECTS + 4 * number + 1)
    left, right = y0 + tl.load(RECTS + 4 * number + 2), y0 + tl.load(RECTS + 4 * number + 3)
    if MASK == 1:  # a block of few rows reaches fewer keys than its chunk
        top, bottom = tl.maximum(top, tl.min(row) - w), tl.minimum(bottom, tl.max(row) + w + 1)
        left, right = tl.maximum(left, tl.min(col) - w), tl.minimum(right, tl.max(col) + w + 1)
    if MASK != -1:
        top, bottom = tl.maximum(top, 0), tl.minimum(bottom, rows)
        left, right = tl.maximum(left, 0), tl.minimum(right, cols)
    width = tl.maximum(right - left, 0)
    return top, left, width, tl.maximum(bottom - top, 0) * width


@triton.jit
def rect_tokens(first, count, width, top, left, BLOCK: tl.constexpr):
    """Return (row, column, exists) of BLOCK tokens of a rectangle, beginning with token `first`.

    top, left: first row and column of the rectangle. width: number of columns. count: number of
    tokens. exists: False beyond the last token.
    """
    number = first + tl.arange(0, BLOCK)
    exists = number < count
    number = tl.where(exists, number, 0)
    return top + number // width, left + number % width, exists


@triton.jit
def resolve_token(row, col, exists, X, Y, w, rows, cols, MASK: tl.constexpr):
    """Return (token index, exists) of the tokens at (row, col).

    rows, cols: size of the image without padding. The returned `exists` is the argument `exists`,
    but False outside of this image too. Where it is False, the token index is 0. In a cyclic
    window, positions outside the grid of chunks are wrapped first.
    """
    if MASK == -1:
        high, wide = tl.cdiv(X, w) * w, tl.cdiv(Y, w) * w
        row = tl.where(row < 0, row + high, tl.where(row >= high, row - high, row))
        col = tl.where(col < 0, col + wide, tl.where(col >= wide, col - wide, col))
    exists = exists & (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
    return tl.where(exists, row * Y + col, 0), exists


@triton.jit
def key_mask(exists):
    """Return a mask to add to the scores of keys: 0 for keys that exist, -inf for other keys."""
    return tl.where(exists, 0.0, NOTHING)


@triton.jit
def window_bias(
    score, TABLE, row, col, key_row, key_col, w, reach_rows, reach_cols, MASK: tl.constexpr
):
    """Add the relative position bias to the scores of a window, and apply the exact mask.

    The exact mask sets the scores of keys that are too far from the query to -inf. TABLE, unless it
    is None, already has -inf for these keys. row, col, key_row, key_col: positions of queries and
    keys, which broadcast to the shape of the scores. In a cyclic window, pass the key positions
    before wrapping.
    """
    if TABLE is not None:
        score = add_bias(score, TABLE, row, col, key_row, key_col, reach_rows, reach_cols)
    elif MASK == 1:
        near = (tl.abs(row - key_row) <= w) & (tl.abs(col - key_col) <= w)
        score = tl.where(near, score, NOTHING)
    return score


@triton.jit
def global_scores(score, TO_GLOBAL, lane, G):
    """Add the bias of the G global keys to their scores.

    lane: the index of each key, (1, keys) for scores (queries, keys), or (keys, 1) for the
    transpose. Keys with an index of G or more do not exist, and their scores become -inf.
    """
    if TO_GLOBAL is not None:
        score += tl.load(TO_GLOBAL + lane, mask=lane < G, other=0.0)
    return tl.where(lane < G, score, NOTHING)


@triton.jit
def softmax_step(score, values, top, total, acc):
    """Add one block of keys to the online softmax of Q queries: score (Q, K), values (K, D_PAD).

    top (Q,): the largest score so far. total (Q,): the sum of exponentials. acc (Q, D_PAD): the sum
    of weighted values. Exponents are relative to `top`, or to 0 while `top` is -inf. Returns the
    updated (top, total, acc).
    """
    higher = tl.maximum(top, tl.max(score, 1))
    level = tl.where(higher == NOTHING, 0.0, higher)
    weight = tl.exp2(score - level[:, None])
    shrink = tl.exp2(top - level)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision="ieee")
    return higher, total, acc


@triton.jit
def listed_scores(
    queries, k, v, TABLE, lists, image, head, number, blocks, row, col, place,
    rows, cols, Y, w, G, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return (scores, keys, values) for Q queries and a block of K keys in a listed key chunk.

    The scores (Q, K) include bias and mask. number: index of the block of keys, see `list_blocks`.
    blocks: the number of such blocks in each key chunk. row, col: positions of the queries in the
    grid. place: row-major index of each query in its chunk.
    """
    key_row, key_col, first, key, is_key, mask = listed_tokens(
        lists, number, blocks, rows, cols, Y, w, K
    )
    keys = read(k, image, head, G + key, D, D_PAD)
    values = read(v, image, head, G + key, D, D_PAD)
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    score += key_mask(is_key)[None, :]
    if TABLE is not None:
        score = add_bias(
            score, TABLE, row[:, None], col[:, None], key_row[None, :], key_col[None, :],
            reach_rows, reach_cols,
        )  # fmt: skip
    return show(score, lists, mask, place, first, w, K), keys, values


@triton.jit
def rectangle_scores(
    queries, k, v, TABLE, image, head, first, count, across, first_row, first_col, row, col,
    X, Y, rows, cols, w, G, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return (scores, keys, values) for Q queries and a block of K keys in a rectangle of tokens.

    The scores (Q, K) include bias and mask. row, col: positions of the queries. first_row,
    first_col: position of the rectangle's first token. count: number of tokens of the rectangle.
    across: number of its columns. first: row-major index in the rectangle of the block's first key.
    """
    key_row, key_col, is_key = rect_tokens(first, count, across, first_row, first_col, K)
    key, is_key = resolve_token(key_row, key_col, is_key, X, Y, w, rows, cols, MASK)
    keys = read(k, image, head, G + key, D, D_PAD)
    values = read(v, image, head, G + key, D, D_PAD)
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    score += key_mask(is_key)[None, :]  # fused with the multiplication by the scale
    score = window_bias(
        score, TABLE, row[:, None], col[:, None], key_row[None, :], key_col[None, :],
        w, reach_rows, reach_cols, MASK,
    )  # fmt: skip
    return score, keys, values


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, LSE, TABLE, TO_GLOBAL, VALID_HW, RECTS, lists,
    num_rects, N, X, Y, w, G, parts, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, MASK: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, K_GLOBAL: tl.constexpr,
):  # fmt: skip
    """Compute the output of one block of queries, and LSE (B, N, L), the log-sum-exp of its scores.

    parts: blocks of queries per chunk. K_GLOBAL: the number of global keys, rounded up to a size
    that tl.dot supports; 0 without global keys.
    """
    scale *= LOG2E
    image, head, part, x0, y0, height, width = own_chunk(parts, N, X, Y, w)
    if part * Q >= height * width:  # the last chunks are smaller: this block has no query
        return
    row, col, exists = chunk_tokens(part * Q, height * width, width, x0, y0, Q)
    rows, cols = real_size(VALID_HW, image, X, Y)
    query = row * Y + col
    queries = read(q, image, head, query, D, D_PAD)
    if TABLE is not None:
        TABLE = head_table(TABLE, head, reach_rows, reach_cols)

    top = tl.full([Q], NOTHING, tl.float32)
    total = tl.zeros([Q], tl.float32)
    acc = tl.zeros([Q, D_PAD], tl.float32)
    if K_GLOBAL > 0:
        lane = tl.arange(0, K_GLOBAL)
        if TO_GLOBAL is not None:
            TO_GLOBAL += head * G
        global_keys = read(k, image, head, tl.minimum(lane, G - 1), D, D_PAD)
        global_values = read(v, image, head, tl.minimum(lane, G - 1), D, D_PAD)
        scores_global = tl.dot(queries, tl.trans(global_keys), input_precision="ieee") * scale
        scores_global = global_scores(scores_global, TO_GLOBAL, lane[None, :], G)
        top, total, acc = softmax_step(scores_global, global_values, top, total, acc)
    if lists is not None:
        place = (row - x0) * w + col - y0
        chunk = x0 // w * tl.cdiv(Y, w) + y0 // w
        begin, end, blocks = list_blocks(lists, head, chunk, w, K)
        for number in tl.range(begin, end):
            score, keys, values = listed_scores(
                queries, k, v, TABLE, lists, image, head, number, blocks, row, col, place,
                rows, cols, Y, w, G, reach_rows, reach_cols, scale, D, D_PAD, K,
            )  # fmt: skip
            top, total, acc = softmax_step(score, values, top, total, acc)
    else:
        for number in tl.range(0, num_rects):
            first_row, first_col, across, count = rectangle(
                RECTS, number, x0, y0, row, col, w, rows, cols, MASK
            )
            for first in tl.range(0, count, K):
                score, keys, values = rectangle_scores(
                    queries, k, v, TABLE, image, head, first, count, across, first_row, first_col,
                    row, col, X, Y, rows, cols, w, G, reach_rows, reach_cols, scale,
                    D, D_PAD, K, MASK,
                )  # fmt: skip
                top, total, acc = softmax_step(score, values, top, total, acc)

    has_keys = total > 0
    acc = acc / tl.where(has_keys, total, 1.0)[:, None]  # a row without keys is 0
    log = (top + tl.log2(tl.where(has_keys, total, 1.0))) * LN2
    first_stat = (image.to(tl.int64) * N + head) * X * Y
    tl.store(LSE + first_stat + query, tl.where(has_keys, log, NOTHING), mask=exists)
    write(out, image, head, query, exists, acc, D, D_PAD)
