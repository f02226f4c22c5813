"""The Triton kernels of fused local attention.

A program computes a block of rows of the score matrix, and walks over the columns of the lists of a
`Plan` (plan.py), K or Q at a time. No kernel uses atomics, so repeated runs give equal bits.

    expand_kernel    the biases and masks of all tiles, from the bias table
    forward_kernel   the output for a block of queries, with the online softmax of FlashAttention
                     (arXiv:2205.14135); also LSE, the log-sum-exp of the scores
    query_kernel     dq for a block of queries; also delta, which the kernels below read
    key_kernel       dk and dv for a block of keys; it walks over queries
    global_kernel    dk and dv of the global keys
    tile_kernel      the gradient of the scores, summed over images and over all pairs of rows and
                     columns that share a tile of biases
    bias_kernel      the gradient of each bias, from the result of tile_kernel

The backward kernels recompute the attention weights P from the scores and the log-sum-exp. The
gradient of the scores is E = P * (dout @ values^T - delta), where delta is the sum of out * dout
over the channels.

Scores are in base 2: the scale and the biases are multiplied by log2(e), so that the exponential is
a single exp2. LSE, which other backends read, is in base e.

Shapes: B images, N heads, L tokens of the grid, G global tokens, D head dim (D_PAD: the next power
of two, at least 16), Q queries and K keys of a block. R, C: see plan.py.
Arguments q, k, v, out, .. are `Tokens` of fused.py: pointer and strides. `lists` is a `Lists` of
plan.py. TILE (N or 1, tiles, R, C) or None: biases and masks. EXISTS (sets, C) or None: a mask of
columns. VALID (B, G+L) or None: a mask of keys that are padding. Masks are 0 or -inf. At least one
of TILE and EXISTS is given.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))
GLOBAL = tl.constexpr(1 << 30)  # see plan.py
BLOCK = tl.constexpr(64)  # see plan.py
# sizes that vary between images: kernels do not specialize on them
SIZES = ["N", "B", "L", "G", "groups", "head_stride", "splits", "num_tiles", "first_tile"]
SIZES += ["entries", "size", "table_head", "table_entry", "global_head", "global_token"]


@triton.jit
def pointers(tokens, image, head, token, D_PAD: tl.constexpr):
    """Return pointers (len(token), D_PAD) to the channels of some tokens of an image and a head.

    tokens: the tensor to point into, as a `Tokens` tuple. token: the indices of the tokens, int64
    if their offsets in memory do not fit into 32 bits.
    """
    at = tokens.at + image.to(tl.int64) * tokens.image + head.to(tl.int64) * tokens.head
    at += tl.arange(0, D_PAD).to(tl.int64)[None, :] * tokens.channel
    return at + token[:, None] * tokens.token


@triton.jit
def read(tokens, image, head, token, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the channels of some tokens of an image and a head, (len(token), D_PAD).

    The channels beyond D are 0.
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
def read_rows(lists, row_base, row_set, part, R, ROWS: tl.constexpr):
    """Return (token, exists) of the ROWS rows of a block. A row that does not exist has the first
    token of its group."""
    offset = tl.load(lists.rows + row_set * R + part * ROWS + tl.arange(0, ROWS))
    return row_base + tl.maximum(offset, 0), offset >= 0


@triton.jit
def own_block(lists, N, groups, head_stride, R, ROWS: tl.constexpr):
    """Return (image, head, group, part, begin, end) of this program.

    The block is rows part*ROWS to (part+1)*ROWS - 1 of the group. begin, end: its columns.
    """
    # consecutive programs compute neighboring groups: columns that they share are in the cache
    number, parts = tl.program_id(0), R // ROWS
    part, group = number % parts, number // parts % groups
    image, head = number // (parts * groups * N), number // (parts * groups) % N
    span = (head * head_stride + group) * tl.cdiv(R, BLOCK) + part * ROWS // BLOCK
    begin, end = tl.load(lists.spans + 2 * span), tl.load(lists.spans + 2 * span + 1)
    return image, head, group, part, begin, end


@triton.jit
def read_list(lists, pair):
    """Return (base, set, tile) of a list of columns: `pair_base`, `pair_set` and `pair_tile`."""
    base, column_set = tl.load(lists.pair_base + pair), tl.load(lists.pair_set + pair)
    return base, column_set, tl.load(lists.pair_tile + pair)


@triton.jit
def column_tokens(lists, base, column_set, column, C, COLUMNS: tl.constexpr):
    """Return the tokens of COLUMNS columns of a list, from `column` on.

    base: the token that their offsets are relative to. Global tokens are independent of it.
    """
    offset = tl.load(lists.columns + column_set * C + column + tl.arange(0, COLUMNS))
    return offset + tl.where(offset >= GLOBAL, -GLOBAL, base)


@triton.jit
def tile_offsets(tile_head, head, part, C, ROWS: tl.constexpr):
    """Return the places (ROWS, 1) in TILE of the first column of a block of rows, for tile 0.

    tile_head: stride of TILE between heads, 0 if they share it.
    """
    return head.to(tl.int64) * tile_head + (part * ROWS + tl.arange(0, ROWS))[:, None] * C


@triton.jit
def read_bias(TILE, EXISTS, rows, tile, tile_size, columns, column, C, COLUMNS: tl.constexpr):
    """Return what is added to the scores of a block of rows and COLUMNS columns.

    rows: result of `tile_offsets`. tile_size: R * C. columns: set of columns. column: the first.
    """
    at = column + tl.arange(0, COLUMNS)
    if TILE is not None:
        bias = tl.load(TILE + (rows + tile.to(tl.int64) * tile_size + at[None, :])).to(tl.float32)
        if EXISTS is not None:
            bias += tl.load(EXISTS + columns * C + at)[None, :]
    else:
        bias = tl.load(EXISTS + columns * C + at)[None, :]
    return bias


@triton.jit
def read_stats(STATS, query):
    """Return (stat, delta) of queries: the log-sum-exp in base 2, and delta.

    STATS (.., L) int64: both as float32, in the low and the high half. One load takes half the
    time of two.
    """
    stats = tl.load(STATS + query)
    stat = stats.to(tl.int32).to(tl.float32, bitcast=True)
    return stat, (stats >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def softmax_step(score, values, top, total, acc, PRECISION: tl.constexpr):
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
    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit(do_not_specialize=SIZES)
def expand_kernel(
    TABLE, TO_GLOBAL, INDEX, TILE, entries, G, size, table_head, table_entry, global_head,
    global_token, most, COUNT: tl.constexpr,
):  # fmt: skip
    """Write COUNT values of TILE (N or 1, size): biases in base 2, at most `most`, or -inf.

    INDEX (size,): see `Plan.bias_index`, of which `size` is the number of elements. TABLE
    (N, entries), TO_GLOBAL (N, G): the biases, or None, with the strides that follow.
    """
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    head = tl.program_id(1).to(tl.int64)
    index = tl.load(INDEX + at, mask=at < size, other=0)
    bias = tl.where(index < entries + G, 0.0, NOTHING)
    if TABLE is not None:
        place = TABLE + head * table_head + index.to(tl.int64) * table_entry
        bias += tl.load(place, mask=index < entries, other=0.0).to(tl.float32)
    if TO_GLOBAL is not None:
        place = TO_GLOBAL + head * global_head + (index - entries).to(tl.int64) * global_token
        is_global = (index >= entries) & (index < entries + G)
        bias += tl.load(place, mask=is_global, other=0.0).to(tl.float32)
    bias *= LOG2E
    bias = tl.where(bias > most, most, bias).to(TILE.dtype.element_ty)
    tl.store(TILE + head * size + at, bias, mask=at < size)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, LSE, lists, TILE, EXISTS, VALID,
    N, L, G, groups, head_stride, R, C, tile_head, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output of one block of queries, and LSE (B, N, L)."""
    scale *= LOG2E
    image, head, group, part, begin, end = own_block(lists, N, groups, head_stride, R, Q)
    row_base, row_set = tl.load(lists.row_base + group), tl.load(lists.row_set + group)
    query, exists = read_rows(lists, row_base, row_set, part, R, Q)
    queries = read(q, image, head, query, D, D_PAD)
    rows = tile_offsets(tile_head, head, part, C, Q)
    if VALID is not None:
        VALID += image.to(tl.int64) * (G + L)

    top = tl.full([Q], NOTHING, tl.float32)
    total = tl.zeros([Q], tl.float32)
    acc = tl.zeros([Q, D_PAD], tl.float32)
    if not LAYOUT:
        base, key_set, tile = read_list(lists, group)
    for number in tl.range(begin // K, end // K):
        column = number * K
        if LAYOUT:
            base, key_set, tile = read_list(lists, column // C)
            column = column % C
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        key = column_tokens(lists, G + base, key_set, column, C, K)
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        bias = read_bias(TILE, EXISTS, rows, tile, R * C, key_set, column, C, K)
        keys, values = read(k, image, head, key, D, D_PAD), read(v, image, head, key, D, D_PAD)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + bias
        if VALID is not None:
            score += tl.load(VALID + key)[None, :]
        top, total, acc = softmax_step(score, values, top, total, acc, PRECISION)

    has_keys = total > 0
    acc = acc / tl.where(has_keys, total, 1.0)[:, None]  # a row without keys is 0
    log = (top + tl.log2(tl.where(has_keys, total, 1.0))) * LN2
    first_stat = (image.to(tl.int64) * N + head) * L
    tl.store(LSE + first_stat + query, tl.where(has_keys, log, NOTHING), mask=exists)
    write(out, image, head, query, exists, acc, D, D_PAD)


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    q, k, v, out, dout, dq, LSE, STATS, lists, TILE, EXISTS, VALID,
    N, L, G, groups, head_stride, R, C, tile_head, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq and STATS (B, N, L, 2) of one block of queries.

    STATS has the log-sum-exp in base 2, +inf for a query without keys, and delta. The kernels below
    read it.

    The gradients of a query's scores add up to 0, but for the rounding of `out`, from which delta
    is computed. In float32, both results are corrected by this sum. In 16 bits, the correction is
    smaller than the rounding error of the weights.
    """
    base_2 = scale * LOG2E
    image, head, group, part, begin, end = own_block(lists, N, groups, head_stride, R, Q)
    row_base, row_set = tl.load(lists.row_base + group), tl.load(lists.row_set + group)
    query, exists = read_rows(lists, row_base, row_set, part, R, Q)
    queries = read(q, image, head, query, D, D_PAD)
    grads = read(dout, image, head, query, D, D_PAD)
    results = read(out, image, head, query, D, D_PAD)
    rows = tile_offsets(tile_head, head, part, C, Q)
    if VALID is not None:
        VALID += image.to(tl.int64) * (G + L)
    first_stat = (image.to(tl.int64) * N + head) * L
    stat = tl.load(LSE + first_stat + query)
    stat = tl.where(stat == NOTHING, float("inf"), stat * LOG2E)  # without keys, weights are 0
    delta = tl.sum(results.to(tl.float32) * grads.to(tl.float32), 1)

    acc = tl.zeros([Q, D_PAD], tl.float32)
    rest = tl.zeros([Q], tl.float32)  # the sum of the gradients of the scores
    pull = tl.zeros([Q, D_PAD], tl.float32)  # the weighted sum of the keys
    if not LAYOUT:
        base, key_set, tile = read_list(lists, group)
    for number in tl.range(begin // K, end // K):
        column = number * K
        if LAYOUT:
            base, key_set, tile = read_list(lists, column // C)
            column = column % C
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        key = column_tokens(lists, G + base, key_set, column, C, K)
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        bias = read_bias(TILE, EXISTS, rows, tile, R * C, key_set, column, C, K)
        keys, values = read(k, image, head, key, D, D_PAD), read(v, image, head, key, D, D_PAD)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * base_2 + bias
        if VALID is not None:
            score += tl.load(VALID + key)[None, :]
        weight = tl.exp2(score - stat[:, None])
        dscore = tl.dot(grads, tl.trans(values), input_precision=PRECISION) - delta[:, None]
        dscore *= weight
        acc = tl.dot(dscore.to(keys.dtype), keys, acc, input_precision=PRECISION)
        if keys.dtype == tl.float32:
            rest += tl.sum(dscore, 1)
            pull = tl.dot(weight, keys, pull, input_precision=PRECISION)

    if queries.dtype == tl.float32:
        acc -= rest[:, None] * pull
        delta += rest
    write(dq, image, head, query, exists, acc * scale, D, D_PAD)
    stats = STATS + 2 * (first_stat + query)
    tl.store(stats, stat, mask=exists)
    tl.store(stats + 1, delta, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def key_kernel(
    q, k, v, dout, dk, dv, STATS, lists, TILE, EXISTS, VALID,
    N, L, G, groups, head_stride, R, C, tile_head, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys. Scores are transposed, (keys, queries).

    lists, TILE, EXISTS: those of a transposed plan.
    """
    base_2 = scale * LOG2E
    image, head, group, part, begin, end = own_block(lists, N, groups, head_stride, R, K)
    row_base, row_set = tl.load(lists.row_base + group), tl.load(lists.row_set + group)
    key, exists = read_rows(lists, G + row_base, row_set, part, R, K)
    keys, values = read(k, image, head, key, D, D_PAD), read(v, image, head, key, D, D_PAD)
    rows = tile_offsets(tile_head, head, part, C, K)
    STATS += (image.to(tl.int64) * N + head) * L

    dkeys = tl.zeros([K, D_PAD], tl.float32)
    dvalues = tl.zeros([K, D_PAD], tl.float32)
    if not LAYOUT:
        base, query_set, tile = read_list(lists, group)
    for number in tl.range(begin // Q, end // Q):
        column = number * Q
        if LAYOUT:
            base, query_set, tile = read_list(lists, column // C)
            column = column % C
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        query = column_tokens(lists, base, query_set, column, C, Q)
        # pyrefly: ignore[unbound-name]  # read before the loop or in it
        bias = read_bias(TILE, EXISTS, rows, tile, R * C, query_set, column, C, Q)
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        stat, delta = read_stats(STATS, query)
        score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * base_2 + bias
        weight = tl.exp2(score - stat[None, :])
        dvalues = tl.dot(weight.to(grads.dtype), grads, dvalues, input_precision=PRECISION)
        dscore = tl.dot(values, tl.trans(grads), input_precision=PRECISION) - delta[None, :]
        dscore = (weight * dscore).to(queries.dtype)
        dkeys = tl.dot(dscore, queries, dkeys, input_precision=PRECISION)
    if VALID is not None:  # padding does not affect the gradients of other keys
        is_key = tl.load(VALID + image.to(tl.int64) * (G + L) + key) == 0
        dkeys = tl.where(is_key[:, None], dkeys, 0.0)
        dvalues = tl.where(is_key[:, None], dvalues, 0.0)
    write(dk, image, head, key, exists, dkeys * scale, D, D_PAD)
    write(dv, image, head, key, exists, dvalues, D, D_PAD)


@triton.jit(do_not_specialize=SIZES)
def global_kernel(
    q, k, v, dout, dk, dv, STATS, TO_GLOBAL, global_head, global_token, splits, N, L, G, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one partial sum of the gradients of the global keys, for one head of one image.

    Partial sum i is over every `splits`-th block of queries, beginning with block i. The partial
    sums are float32 and must be added afterwards: dk and dv (B, N, splits*G, D). TO_GLOBAL (N, G)
    or None: the bias toward global keys, with the strides that follow. K: at least G.
    """
    number = tl.program_id(0)
    split, head, image = number % splits, number // splits % N, number // (splits * N)
    lane = tl.arange(0, K)
    key = tl.minimum(lane, G - 1)
    keys, values = read(k, image, head, key, D, D_PAD), read(v, image, head, key, D, D_PAD)
    STATS += (image.to(tl.int64) * N + head) * L
    bias = tl.zeros([K], tl.float32)
    if TO_GLOBAL is not None:
        place = TO_GLOBAL + head.to(tl.int64) * global_head + key * global_token
        bias = tl.load(place).to(tl.float32) * LOG2E

    dkeys = tl.zeros([K, D_PAD], tl.float32)
    dvalues = tl.zeros([K, D_PAD], tl.float32)
    for first in tl.range(split * Q, L, splits * Q):
        query = first + tl.arange(0, Q)
        is_query = query < L
        query = tl.where(is_query, query, 0).to(tl.int64)
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        stat, delta = read_stats(STATS, query)
        stat = tl.where(is_query, stat, float("inf"))
        score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (scale * LOG2E)
        weight = tl.exp2(score + bias[:, None] - stat[None, :])
        dvalues = tl.dot(weight.to(grads.dtype), grads, dvalues, input_precision=PRECISION)
        dscore = tl.dot(values, tl.trans(grads), input_precision=PRECISION) - delta[None, :]
        dscore = (weight * dscore).to(queries.dtype)
        dkeys = tl.dot(dscore, queries, dkeys, input_precision=PRECISION)

    write(dk, image, head, split * G + lane, lane < G, dkeys * scale, D, D_PAD)
    write(dv, image, head, split * G + lane, lane < G, dvalues, D, D_PAD)


@triton.jit(do_not_specialize=SIZES)
def tile_kernel(
    q, k, v, dout, STATS, lists, TILE, EXISTS, VALID, SUMS, JOBS, ITEMS, ITEM_STARTS,
    B, N, L, G, head_stride, num_tiles, R, C, tile_head, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum gradients of scores over images and items into SUMS (jobs, N, R, C) float32.

    JOBS (jobs, 3): the tile, the number of the job, and the number of jobs for this tile, among
    which its images and items are divided. ITEMS, ITEM_STARTS: see `Plan`. head_stride: num_tiles
    if heads have different items, else 0.
    """
    number, blocks, parts = tl.program_id(0), C // K, R // Q
    column, part = number % blocks * K, number // blocks % parts
    head, job = number // (blocks * parts) % N, number // (blocks * parts * N)
    tile, split = tl.load(JOBS + 3 * job), tl.load(JOBS + 3 * job + 1)
    splits = tl.load(JOBS + 3 * job + 2)
    starts = ITEM_STARTS + (head_stride > 0).to(tl.int32) * head * num_tiles + tile
    first, end = tl.load(starts), tl.load(starts + 1)
    rows = tile_offsets(tile_head, head, part, C, Q)
    bias = tl.zeros([Q, K], tl.float32)
    if TILE is not None:
        bias = read_bias(TILE, None, rows, tile, R * C, 0, column, C, K)

    count = end - first
    acc = tl.zeros([Q, K], tl.float32)
    for number in tl.range(split, B * count, splits):
        image, item = number // count, ITEMS + 4 * (first + number % count)
        row_base, row_set = tl.load(item), tl.load(item + 1)
        base, key_set = tl.load(item + 2), tl.load(item + 3)
        query, exists = read_rows(lists, row_base, row_set, part, R, Q)
        key = column_tokens(lists, G + base, key_set, column, C, K)
        queries = read(q, image, head, query, D, D_PAD)
        grads = read(dout, image, head, query, D, D_PAD)
        keys, values = read(k, image, head, key, D, D_PAD), read(v, image, head, key, D, D_PAD)
        first_stat = (image.to(tl.int64) * N + head) * L
        stat, delta = read_stats(STATS + first_stat, query)
        stat = tl.where(exists, stat, float("inf"))
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E) + bias
        if EXISTS is not None:
            score += tl.load(EXISTS + key_set * C + column + tl.arange(0, K))[None, :]
        if VALID is not None:
            score += tl.load(VALID + image.to(tl.int64) * (G + L) + key)[None, :]
        dscore = tl.dot(grads, tl.trans(values), input_precision=PRECISION) - delta[:, None]
        acc += tl.exp2(score - stat[:, None]) * dscore

    row = part * Q + tl.arange(0, Q)
    at = SUMS + ((job * N + head).to(tl.int64) * R + row[:, None]) * C
    tl.store(at + column + tl.arange(0, K)[None, :], acc)


@triton.jit(do_not_specialize=SIZES)
def bias_kernel(
    SUMS, ORDER, STARTS, JOB_STARTS, DBIAS, first_tile, num_tiles, splits, N, tile_size,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the gradient of one bias of one head, from SUMS (jobs, N, R, C), to DBIAS (N, biases).

    ORDER, STARTS: the pairs of a row and a column, as indices into (T, R, C), sorted by their bias,
    and the first pair of each bias. SUMS has jobs for the tiles from `first_tile` on, num_tiles of
    them. JOB_STARTS (num_tiles + 1,): the first job of each. splits: the largest number of jobs of
    a tile. tile_size: R * C.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(STARTS + number), tl.load(STARTS + number + 1)
    acc = tl.zeros([PAIRS], tl.float32)
    for start in tl.range(first, end, PAIRS):
        at = start + tl.arange(0, PAIRS)
        pair = tl.load(ORDER + at, mask=at < end, other=0)
        tile, inside = pair // tile_size - first_tile, pair % tile_size
        here = (at < end) & (tile >= 0) & (tile < num_tiles)
        job = tl.load(JOB_STARTS + tile, mask=here, other=0)
        count = tl.load(JOB_STARTS + tile + 1, mask=here, other=0) - job
        for split in tl.range(0, splits):
            part = ((job + split) * N + head).to(tl.int64) * tile_size + inside
            acc += tl.load(SUMS + part, mask=split < count, other=0.0)
    total = DBIAS + head * tl.num_programs(0) + number
    tl.store(total, tl.load(total) + tl.sum(acc, 0))
