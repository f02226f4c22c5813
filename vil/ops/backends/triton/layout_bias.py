"""The gradient of a layout's bias table, without atomics, so repeated runs are bitwise equal.

A step is the displacement between a query chunk and a key chunk. All pairs of chunks with the same
step have the same bias. The gradient is therefore computed by two kernels:
- step_kernel computes a tile for each step and head, the gradient of the scores between the tokens
  of two chunks (w*w queries, w*w keys), summed over all images and all pairs of chunks.
- displacement_kernel sums all entries of the tiles that have the same displacement between the
  query and the key.

Shapes: see lists.py. E pairs of chunks.
"""

import triton
import triton.language as tl

from vil.ops.backends.triton.backward import read_stat
from vil.ops.backends.triton.forward import LOG2E, SIZES, key_mask, read, real_size
from vil.ops.backends.triton.lists import add_bias, chunk_places, head_table, show


@triton.jit(do_not_specialize=SIZES)
def step_kernel(
    q, k, v, dout, LSE, DELTA, TABLE, VALID_HW, TILE, lists, KEY_CHUNKS,
    part, first_step, num_steps, splits, B, N, X, Y, w, G, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the scores over images and chunk pairs, separately for each step.

    A launch computes `num_steps` steps, starting with step `first_step`. Of each query chunk, it
    takes Q queries, starting with query part*Q.
    TILE (splits, num_steps, N, Q, w*w) float32: the sums. The images and chunk pairs of each step
    are divided into `splits` parts, and each part has its own sum.
    lists: the query chunk of each chunk pair, sorted by step.
    KEY_CHUNKS (E,): the key chunk of each chunk pair, in the same order.
    """
    blocks = tl.cdiv(w * w, K)
    number = tl.program_id(0)
    block, head = number % blocks, number // blocks % N
    step, split = number // (blocks * N) % num_steps, number // (blocks * N * num_steps)
    start = lists.starts + head * lists.stride + first_step + step
    begin = tl.load(start)
    count = tl.load(start + 1) - begin
    bias = tl.zeros([Q, K], tl.float32)
    if TABLE is not None:  # all pairs of a step have the same bias
        # a head may have no pair with this step; then `begin` may be past the end of the lists
        chunk = tl.load(lists.chunks + begin, mask=count > 0, other=0)
        key_chunk = tl.load(KEY_CHUNKS + begin, mask=count > 0, other=0)
        row, col, place, query, is_query = chunk_places(chunk, part * Q, X, Y, Y, w, Q)
        key_row, key_col, key_place, key, is_key = chunk_places(key_chunk, block * K, X, Y, Y, w, K)
        bias = add_bias(
            bias, head_table(TABLE, head, reach_rows, reach_cols), row[:, None], col[:, None],
            key_row[None, :], key_col[None, :], reach_rows, reach_cols,
        )  # fmt: skip

    acc = tl.zeros([Q, K], tl.float32)
    for item in tl.range(split, B * count, splits):
        image, pair = item // count, begin + item % count
        rows, cols = real_size(VALID_HW, image, X, Y)
        row, col, place, query, is_query = chunk_places(
            tl.load(lists.chunks + pair), part * Q, X, Y, Y, w, Q
        )
        key_row, key_col, key_place, key, is_key = chunk_places(
            tl.load(KEY_CHUNKS + pair), block * K, rows, cols, Y, w, K
        )
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        keys = read(k, image, head, G + key, D, D_PAD)
        values = read(v, image, head, G + key, D, D_PAD)
        first_stat = (image.to(tl.int64) * N + head) * X * Y
        stat = read_stat(LSE + first_stat, query, is_query)
        delta = tl.load(DELTA + first_stat + query)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        score += key_mask(is_key)[None, :]
        score = show(score, lists, tl.load(lists.masks + pair), place, block * K, w, K)
        dscore = tl.dot(grads, tl.trans(values), input_precision="ieee") - delta[:, None]
        acc += tl.exp2(score + bias - stat[:, None]) * dscore

    line = ((split * num_steps + step) * N + head).to(tl.int64) * Q + tl.arange(0, Q)
    key_place = block * K + tl.arange(0, K)
    at = TILE + line[:, None] * (w * w) + key_place[None, :]
    tl.store(at, acc, mask=(key_place < w * w)[None, :])


@triton.jit(do_not_specialize=SIZES)
def displacement_kernel(
    TILE, STEP_AT, DTABLE, part, first_step, num_steps, splits, N, span_rows, span_cols, w,
    Q: tl.constexpr, LINES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sum the entries of TILE for each displacement between tokens, and add the sums to DTABLE.

    span_rows, span_cols: one more than the largest absolute step, in rows and columns of chunks.
    TILE: the result of `step_kernel` for the same part, first_step, num_steps and splits.
    DTABLE (N, 2*span_rows*w - 1, 2*span_cols*w - 1) float32: the gradient of the bias. The
    displacement (0, 0) is in the middle.
    STEP_AT (2*span_rows - 1, 2*span_cols - 1) int32: the index of each step. The step (0, 0) is in
    the middle. The index is -1 if no pair of chunks has this step.
    """
    wide = 2 * span_cols * w - 1
    entries = (2 * span_rows * w - 1) * wide
    blocks = tl.cdiv(entries, ENTRIES)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    is_entry = entry < entries
    down, right = entry // wide + 1, entry % wide + 1  # plus span * w, so above 0
    acc = tl.zeros([ENTRIES], tl.float32)
    for quarter in tl.static_range(4):  # a displacement of tokens occurs in up to four steps
        step_row, step_col = down // w + quarter // 2, right // w + quarter % 2  # plus span
        exists = is_entry & (step_row > 0) & (step_row < 2 * span_rows)
        exists = exists & (step_col > 0) & (step_col < 2 * span_cols)
        step_at = STEP_AT + (step_row - 1) * (2 * span_cols - 1) + step_col - 1
        step = tl.load(step_at, mask=exists, other=-1) - first_step
        exists = exists & (step >= 0) & (step < num_steps)
        inner_row, inner_col = down - step_row * w, right - step_col * w
        for first in tl.range(0, splits * Q, LINES):
            line = first + tl.arange(0, LINES)
            place = part * Q + line % Q
            key_row = (place // w)[:, None] - inner_row[None, :]
            key_col = (place % w)[:, None] - inner_col[None, :]
            inside = (place < w * w)[:, None] & exists[None, :]
            inside = inside & (key_row >= 0) & (key_row < w) & (key_col >= 0) & (key_col < w)
            at = (line // Q * num_steps)[:, None] + step[None, :]
            at = (at * N + head).to(tl.int64) * Q + (line % Q)[:, None]
            acc += tl.sum(
                tl.load(TILE + at * (w * w) + key_row * w + key_col, mask=inside, other=0.0), 0
            )
    at = DTABLE + head * entries + entry
    tl.store(at, tl.load(at, mask=is_entry) + acc, mask=is_entry)
