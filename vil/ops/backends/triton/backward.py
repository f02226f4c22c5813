"""The backward kernels of fused local attention.

They recompute the attention weights P from the scores and the log-sum-exp of the forward pass. The
gradient of the scores is E = P * (dout @ values^T - delta), where delta is the sum of out * dout
over the channels. There are no atomics, so repeated runs give bitwise equal results. The kernels
compute these results, where dq and dk are also multiplied by `scale`:

    query_kernel     dq = E @ keys for a block of queries; also delta, which the other kernels read
    key_kernel       dk = E^T @ queries and dv = P^T @ dout for a block of keys of a chunk
    global_kernel    dk and dv of the global keys, and the gradient of their bias
    tile_kernel      E summed over images and chunks, for each pair of a query position and a key
                     position relative to the query's chunk
    table_kernel     the gradient of the bias table, from the result of tile_kernel

tile_kernel and table_kernel are for windows. layout_bias.py does the same for layouts.

Shapes: see forward.py.
"""

import triton
import triton.language as tl

from vil.ops.backends.triton.forward import (
    LOG2E,
    SIZES,
    chunk_tokens,
    global_scores,
    key_mask,
    listed_scores,
    own_chunk,
    read,
    real_size,
    rect_tokens,
    rectangle,
    rectangle_scores,
    resolve_token,
    window_bias,
    write,
)
from vil.ops.backends.triton.lists import (
    NOTHING,
    add_bias,
    corner,
    head_table,
    list_blocks,
    listed_tokens,
    show,
)


@triton.jit
def read_stat(LSE, token, exists):
    """Load the log-sum-exp of the queries with indices `token`, converted from base e to base 2.

    The result is +inf for queries without keys and for lanes where `exists` is False, so that their
    attention weights are 0.
    """
    stat = tl.load(LSE + token)
    return tl.where(exists & (stat != NOTHING), stat * LOG2E, float("inf"))


@triton.jit
def grad_step(score, stat, grads, delta, keys, values, acc, rest, pull):
    """Add the contribution of K keys to three sums for Q queries. Returns (acc, rest, pull).

    score (Q, K): the scores in base 2. keys, values (K, D_PAD).
    stat (Q,): the log-sum-exp of the queries. delta (Q,): the sum of out * dout over the channels.
    grads (Q, D_PAD): dout, the gradient of the output.
    acc (Q, D_PAD): the gradient of the queries without the factor `scale`.
    rest (Q,): the sums over keys of the gradient of the scores. They would be 0 without rounding,
    and `query_kernel` adds them to delta to correct the rounding error of delta.
    pull (Q, D_PAD): the sum of attention weights @ keys, for float32 only. `query_kernel` uses it
    to correct acc for the same error.
    """
    weight = tl.exp2(score - stat[:, None])
    dscore = tl.dot(grads, tl.trans(values), input_precision="ieee") - delta[:, None]
    dscore *= weight
    rest += tl.sum(dscore, 1)
    acc = tl.dot(dscore.to(keys.dtype), keys, acc, input_precision="ieee")
    if keys.dtype == tl.float32:  # in 16 bits, the correction is smaller than the rounding error
        pull = tl.dot(weight, keys, pull, input_precision="ieee")
    return acc, rest, pull


@triton.jit
def key_step(score, stat, delta, queries, grads, values, dkeys, dvalues):
    """Add the contribution of Q queries to the gradients of K keys. Returns (dkeys, dvalues).

    score (K, Q): the scores in base 2. queries (Q, D_PAD). values (K, D_PAD).
    stat, delta, grads: as in `grad_step`.
    dkeys, dvalues (K, D_PAD): the sums so far. dkeys lacks the factor `scale` of the scores.
    """
    weight = tl.exp2(score - stat[None, :])
    dscore = tl.dot(values, tl.trans(grads), input_precision="ieee") - delta[None, :]
    dvalues = tl.dot(weight.to(grads.dtype), grads, dvalues, input_precision="ieee")
    dscore = (weight * dscore).to(queries.dtype)
    dkeys = tl.dot(dscore, queries, dkeys, input_precision="ieee")
    return dkeys, dvalues


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    q, k, v, out, dout, dq, LSE, DELTA, TABLE, TO_GLOBAL, VALID_HW, RECTS, lists,
    num_rects, N, X, Y, w, G, parts, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, MASK: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, K_GLOBAL: tl.constexpr,
):  # fmt: skip
    """Compute dq and DELTA (B, N, L) of one block of queries. The other kernels read DELTA.

    DELTA is the sum of out * dout over the channels of each query, corrected for the rounding of
    `out`, see `grad_step`.
    """
    base_2 = scale * LOG2E
    image, head, part, x0, y0, height, width = own_chunk(parts, N, X, Y, w)
    if part * Q >= height * width:
        return
    row, col, exists = chunk_tokens(part * Q, height * width, width, x0, y0, Q)
    rows, cols = real_size(VALID_HW, image, X, Y)
    query = row * Y + col
    queries = read(q, image, head, query, D, D_PAD)
    grads = read(dout, image, head, query, D, D_PAD)
    results = read(out, image, head, query, D, D_PAD)
    if TABLE is not None:
        TABLE = head_table(TABLE, head, reach_rows, reach_cols)

    first_stat = (image.to(tl.int64) * N + head) * X * Y
    stat = read_stat(LSE + first_stat, query, exists)
    delta = tl.sum(results.to(tl.float32) * grads.to(tl.float32), 1)

    rest = tl.zeros([Q], tl.float32)
    acc = tl.zeros([Q, D_PAD], tl.float32)
    pull = tl.zeros([Q, D_PAD], tl.float32)
    if K_GLOBAL > 0:
        lane = tl.arange(0, K_GLOBAL)
        if TO_GLOBAL is not None:
            TO_GLOBAL += head * G
        global_keys = read(k, image, head, tl.minimum(lane, G - 1), D, D_PAD)
        global_values = read(v, image, head, tl.minimum(lane, G - 1), D, D_PAD)
        scores_global = tl.dot(queries, tl.trans(global_keys), input_precision="ieee") * base_2
        scores_global = global_scores(scores_global, TO_GLOBAL, lane[None, :], G)
        acc, rest, pull = grad_step(
            scores_global, stat, grads, delta, global_keys, global_values, acc, rest, pull
        )
    if lists is not None:
        place = (row - x0) * w + col - y0
        chunk = x0 // w * tl.cdiv(Y, w) + y0 // w
        begin, end, blocks = list_blocks(lists, head, chunk, w, K)
        for number in tl.range(begin, end):
            score, keys, values = listed_scores(
                queries, k, v, TABLE, lists, image, head, number, blocks, row, col, place,
                rows, cols, Y, w, G, reach_rows, reach_cols, base_2, D, D_PAD, K,
            )  # fmt: skip
            acc, rest, pull = grad_step(score, stat, grads, delta, keys, values, acc, rest, pull)
    else:
        for number in tl.range(0, num_rects):
            first_row, first_col, across, count = rectangle(
                RECTS, number, x0, y0, row, col, w, rows, cols, MASK
            )
            for first in tl.range(0, count, K):
                score, keys, values = rectangle_scores(
                    queries, k, v, TABLE, image, head, first, count, across, first_row, first_col,
                    row, col, X, Y, rows, cols, w, G, reach_rows, reach_cols, base_2,
                    D, D_PAD, K, MASK,
                )  # fmt: skip
                acc, rest, pull = grad_step(
                    score, stat, grads, delta, keys, values, acc, rest, pull
                )
    if queries.dtype == tl.float32:
        acc -= rest[:, None] * pull
    write(dq, image, head, query, exists, acc * scale, D, D_PAD)
    tl.store(DELTA + first_stat + query, delta + rest, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def key_kernel(
    q, k, v, dout, dk, dv, LSE, DELTA, TABLE, VALID_HW, RECTS, lists,
    num_rects, N, X, Y, w, G, parts, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, MASK: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys of a chunk. Scores are transposed, (keys, queries).

    RECTS (for a window) or `lists` (for a layout) describe the queries that attend to the chunk's
    keys. In `query_kernel`, they describe the keys that the chunk's queries attend to.
    """
    base_2 = scale * LOG2E
    image, head, part, x0, y0, height, width = own_chunk(parts, N, X, Y, w)
    if part * K >= height * width:
        return
    key_row, key_col, exists = chunk_tokens(part * K, height * width, width, x0, y0, K)
    rows, cols = real_size(VALID_HW, image, X, Y)
    is_key = (key_row < rows) & (key_col < cols)
    key = key_row * Y + key_col
    keys = read(k, image, head, G + key, D, D_PAD)
    values = read(v, image, head, G + key, D, D_PAD)
    first_stat = (image.to(tl.int64) * N + head) * X * Y
    LSE += first_stat
    DELTA += first_stat
    if TABLE is not None:
        TABLE = head_table(TABLE, head, reach_rows, reach_cols)

    dkeys = tl.zeros([K, D_PAD], tl.float32)
    dvalues = tl.zeros([K, D_PAD], tl.float32)
    if lists is not None:
        key_place = (key_row - x0) * w + key_col - y0
        chunk = x0 // w * tl.cdiv(Y, w) + y0 // w
        begin, end, blocks = list_blocks(lists, head, chunk, w, Q)
        for number in tl.range(begin, end):
            row, col, first, query, is_query, mask = listed_tokens(
                lists, number, blocks, X, Y, Y, w, Q
            )
            queries = read(q, image, head, query, D, D_PAD)
            grads = read(dout, image, head, query, D, D_PAD)
            stat, delta = read_stat(LSE, query, is_query), tl.load(DELTA + query)
            score = tl.dot(keys, tl.trans(queries), input_precision="ieee") * base_2
            if TABLE is not None:
                score = add_bias(
                    score, TABLE, row[None, :], col[None, :], key_row[:, None], key_col[:, None],
                    reach_rows, reach_cols,
                )  # fmt: skip
            score = show(score, lists, mask, key_place, first, w, Q)
            dkeys, dvalues = key_step(score, stat, delta, queries, grads, values, dkeys, dvalues)
    else:
        for number in tl.range(0, num_rects):
            first_row, first_col, across, count = rectangle(
                RECTS, number, x0, y0, key_row, key_col, w, X, Y, MASK
            )
            for first in tl.range(0, count, Q):
                row, col, is_query = rect_tokens(first, count, across, first_row, first_col, Q)
                query, is_query = resolve_token(row, col, is_query, X, Y, w, X, Y, MASK)
                queries = read(q, image, head, query, D, D_PAD)
                grads = read(dout, image, head, query, D, D_PAD)
                stat, delta = read_stat(LSE, query, is_query), tl.load(DELTA + query)
                score = tl.dot(keys, tl.trans(queries), input_precision="ieee") * base_2
                score = window_bias(
                    score, TABLE, row[None, :], col[None, :], key_row[:, None], key_col[:, None],
                    w, reach_rows, reach_cols, MASK,
                )  # fmt: skip
                dkeys, dvalues = key_step(
                    score, stat, delta, queries, grads, values, dkeys, dvalues
                )
    # Padding needs no mask before, because it does not affect the gradients of other keys.
    dkeys = tl.where(is_key[:, None], dkeys * scale, 0.0)
    dvalues = tl.where(is_key[:, None], dvalues, 0.0)
    write(dk, image, head, G + key, exists, dkeys, D, D_PAD)
    write(dv, image, head, G + key, exists, dvalues, D, D_PAD)


@triton.jit(do_not_specialize=SIZES)
def global_kernel(
    q, k, v, dout, dk, dv, LSE, DELTA, TO_GLOBAL, DBIAS,
    splits, N, L, G, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K_GLOBAL: tl.constexpr,
):  # fmt: skip
    """Compute one partial sum of the gradients of the global keys, for one head of one image.

    Partial sum i is over every `splits`-th block of queries, beginning with block i. The partial
    sums are float32 and must be added afterwards: dk and dv (B, N, splits*G, D), and DBIAS (B, N,
    splits, G).
    """
    number = tl.program_id(0)
    split, head, image = number % splits, number // splits % N, number // (splits * N)
    lane = tl.arange(0, K_GLOBAL)
    keys = read(k, image, head, tl.minimum(lane, G - 1), D, D_PAD)
    values = read(v, image, head, tl.minimum(lane, G - 1), D, D_PAD)
    first_stat = (image.to(tl.int64) * N + head) * L
    LSE += first_stat
    DELTA += first_stat
    if TO_GLOBAL is not None:
        TO_GLOBAL += head * G

    dkeys = tl.zeros([K_GLOBAL, D_PAD], tl.float32)
    dvalues = tl.zeros([K_GLOBAL, D_PAD], tl.float32)
    dbias = tl.zeros([K_GLOBAL], tl.float32)
    for first in tl.range(split * Q, L, splits * Q):
        query = first + tl.arange(0, Q)
        is_query = query < L
        query = tl.where(is_query, query, 0)
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        stat, delta = read_stat(LSE, query, is_query), tl.load(DELTA + query)
        score = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (scale * LOG2E)
        score = global_scores(score, TO_GLOBAL, lane[:, None], G)
        weight = tl.exp2(score - stat[None, :])
        dscore = tl.dot(values, tl.trans(grads), input_precision="ieee") - delta[None, :]
        dvalues = tl.dot(weight.to(grads.dtype), grads, dvalues, input_precision="ieee")
        dscore *= weight
        dbias += tl.sum(dscore, 1)
        dkeys = tl.dot(dscore.to(queries.dtype), queries, dkeys, input_precision="ieee")

    write(dk, image, head, split * G + lane, lane < G, dkeys * scale, D, D_PAD)
    write(dv, image, head, split * G + lane, lane < G, dvalues, D, D_PAD)
    if DBIAS is not None:
        tl.store(DBIAS + number.to(tl.int64) * G + lane, dbias, mask=lane < G)


@triton.jit(do_not_specialize=SIZES)
def tile_kernel(
    q, k, v, dout, LSE, DELTA, TABLE, VALID_HW, TILE,
    part, top, left, width, cells, splits, B, N, X, Y, w, G, reach_rows, reach_cols, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, MASK: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sum gradients of scores over images and chunks into TILE (splits, N, Q, cells) float32.

    Each entry of TILE is for a pair of a query position and a key position relative to the query's
    chunk. `table_kernel` computes the gradient of the bias from TILE.

    Queries: Q tokens of each chunk, beginning with index part*Q. Keys: the `cells` tokens of a
    rectangle with `width` columns, which begins at row `top` and column `left` relative to the
    chunk's first token. TILE[i] sums every `splits`-th (image, chunk) pair, beginning with pair i.
    """
    blocks = tl.cdiv(cells, K)
    number = tl.program_id(0)
    block, head, split = number % blocks, number // blocks % N, number // (blocks * N)
    place = part * Q + tl.arange(0, Q)
    in_chunk = place < w * w
    row, col = tl.where(in_chunk, place // w, 0), tl.where(in_chunk, place % w, 0)
    key_row, key_col, in_cells = rect_tokens(block * K, cells, width, top, left, K)
    if TABLE is not None:
        TABLE = head_table(TABLE, head, reach_rows, reach_cols)
    bias = window_bias(
        tl.zeros([Q, K], tl.float32), TABLE, row[:, None], col[:, None],
        key_row[None, :], key_col[None, :], w, reach_rows, reach_cols, MASK,
    )  # fmt: skip

    chunks = tl.cdiv(X, w) * tl.cdiv(Y, w)
    acc = tl.zeros([Q, K], tl.float32)
    for item in tl.range(split, B * chunks, splits):
        image = item // chunks
        x0, y0 = corner(item % chunks, w, Y)
        rows, cols = real_size(VALID_HW, image, X, Y)
        query, is_query = resolve_token(x0 + row, y0 + col, in_chunk, X, Y, w, X, Y, 0)
        key, is_key = resolve_token(x0 + key_row, y0 + key_col, in_cells, X, Y, w, rows, cols, MASK)
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        keys = read(k, image, head, G + key, D, D_PAD)
        values = read(v, image, head, G + key, D, D_PAD)
        first_stat = (image.to(tl.int64) * N + head) * X * Y
        stat = read_stat(LSE + first_stat, query, is_query)
        delta = tl.load(DELTA + first_stat + query)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        score += key_mask(is_key)[None, :]
        dscore = tl.dot(grads, tl.trans(values), input_precision="ieee") - delta[:, None]
        acc += tl.exp2(score + bias - stat[:, None]) * dscore

    line = (split * N + head).to(tl.int64) * Q + tl.arange(0, Q)
    cell = block * K + tl.arange(0, K)
    tl.store(TILE + line[:, None] * cells + cell[None, :], acc, mask=in_cells[None, :])


@triton.jit(do_not_specialize=SIZES)
def table_kernel(
    TILE, DTABLE, part, top, left, height, width, cells, splits, N, w,
    Q: tl.constexpr, LINES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sum TILE over splits and by displacement, and add the sums to DTABLE.

    TILE (splits, N, Q, cells): the result of `tile_kernel`. part, top, left, width, cells: as in
    `tile_kernel`. height: number of rows of its rectangle of keys.
    DTABLE (N, (4w-1)**2) float32: the gradient of the bias for each displacement, query position
    minus key position.
    """
    side = 4 * w - 1
    blocks = tl.cdiv(side * side, ENTRIES)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    down, right = entry // side - (2 * w - 1), entry % side - (2 * w - 1)
    acc = tl.zeros([ENTRIES], tl.float32)
    for first in tl.range(0, splits * Q, LINES):
        line = first + tl.arange(0, LINES)
        place = part * Q + line % Q
        key_row = (place // w)[:, None] - down[None, :] - top
        key_col = (place % w)[:, None] - right[None, :] - left
        inside = (place < w * w)[:, None] & (entry < side * side)[None, :]
        inside = inside & (key_row >= 0) & (key_row < height) & (key_col >= 0) & (key_col < width)
        at = (line // Q * N + head).to(tl.int64) * Q + line % Q
        part_sums = tl.load(
            TILE + at[:, None] * cells + key_row * width + key_col, mask=inside, other=0.0
        )
        acc += tl.sum(part_sums, 0)
    at = DTABLE + head * side * side + entry
    tl.store(at, tl.load(at, mask=entry < side * side) + acc, mask=entry < side * side)
