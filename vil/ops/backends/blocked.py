"""Local attention for a few query chunks at a time, in plain PyTorch.

A block of query chunks, usually a single one, has a list of key chunks, see chunk_plan.py. The
scores of a batch of blocks are computed, used and dropped, and the backward pass recomputes them,
as in FlashAttention (arXiv:2205.14135). A call is split into parts with a few images and heads
each, so that the copies of their tokens in chunk order stay small too.

Shapes: B batch, N heads, L tokens, G global tokens, D channels, Q chunks of W tokens, S
displacements between chunks.
In a `ListGroup`: P blocks of M query chunks with J key chunks.
In a `Part`: b images and n heads.
In a `Batch`: p blocks of a group, h = b*n*p blocks of all images and heads of the part, T = G + J*W
keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import from_tiles, to_tiles
from vil.ops.backends.chunk_plan import Plan, make_plan
from vil.ops.call import Call, Gradients
from vil.ops.custom_op import declare_attention
from vil.ops.window import real_cells
from vil.utils.transforms import is_exporting

# the largest scores of a batch, and the largest q of a part. On CPUs for few operations, because
# each waits for its slowest thread if another process takes a core: with 2 and 4 MiB, this took
# twice as long as with 12 MiB, although large calls alone took only 0.8 to 0.9 of the time. On GPUs
# more.
SCORE_BYTES = {"cpu": 12 << 20, "cuda": 1 << 28}
PART_BYTES = {"cpu": 12 << 20, "cuda": 1 << 26}
BIAS_BYTES = 1 << 24  # bias of all displacements between chunks, for the heads of a part
softmax_backward = torch.ops.aten._softmax_backward_data.out  # (dout - sum(dout out)) out


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    checks = {
        "with dropout, the backward pass would recompute other weights": case.dropout,
        # torch.compile passes the size when it runs
        "an exported file cannot compute chunks of a symbolic grid": case.window.symbolic
        and is_exporting(),
    }
    return [text for text, applies in checks.items() if applies]


def forward(call: Call, *, sizes_only: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores.

    sizes_only: compute only one batch of each size, to measure the peak memory quickly.
    """
    out, lse = torch.empty_like(call.q), call.q.new_empty(call.q.shape[:3], dtype=wide(call.q))
    least, seen = torch.finfo(lse.dtype).min, set()
    for part in split_call(call):
        rows = torch.zeros_like(part.q)
        stat = torch.full(rows.shape[:-1], least, dtype=lse.dtype, device=rows.device)
        has_empty = may_have_empty(call, part.plan)
        for batch in part.batches():
            if sizes_only and batch.size in seen:
                continue
            seen.add(batch.size)
            weights, largest = part.scores(batch, part.queries(batch), part.keys(batch)), None
            if call.needs_lse or has_empty:
                largest = weights.amax(-1)
            torch.softmax(weights, -1, out=weights)
            if largest is not None:  # the largest weight is 1 over the sum of exponentials
                put(stat, largest - weights.amax(-1).log(), batch)
            put(rows, torch.bmm(weights.to(rows.dtype), part.values(batch)), batch)
            del weights  # before the next batch allocates its own
        if has_empty:
            empty = stat <= least
            rows.masked_fill_(empty[..., None], 0.0)
            stat.masked_fill_(empty, -torch.inf)
        restore(rows, part.plan, part.of(out))
        if call.needs_lse:
            restore(stat[..., None], part.plan, part.of(lse)[..., None])
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases. dout: the gradient of the output.

    `lse` (log-sum-exp of the scores) is used only to find queries without keys. `out` is not used.
    """
    dq, dk, dv = (torch.empty_like(x) for x in call[:3])
    dbias = [None if x is None else torch.zeros_like(x, dtype=wide(call.q)) for x in call.bias]
    for part in split_call(call):
        grads = part.of(dout)
        if may_have_empty(call, part.plan):
            grads = grads.masked_fill((part.of(lse) == -torch.inf)[..., None], 0.0)
        grads = divide(grads, part.plan).unflatten(2, (-1, part.plan.tile))
        rows, sums = torch.zeros_like(part.q), BiasSums(part)
        key_grad, value_grad = (KeyGrad(part) for _ in range(2))
        for batch in part.batches():
            queries, keys = part.queries(batch), part.keys(batch)
            grad = gather(grads, batch)
            # not exp(scores - lse), which would scale all weights by the rounding error of lse
            weights = part.scores(batch, queries, keys)
            torch.softmax(weights, -1, out=weights)
            dscores = torch.bmm(grad, part.values(batch).mT).to(weights.dtype)
            softmax_backward(dscores, weights, -1, weights.dtype, grad_input=dscores)
            sums.add(dscores, batch)
            weights, dscores = weights.to(grad.dtype), dscores.to(grad.dtype)
            put(rows, torch.bmm(dscores, keys), batch)
            key_grad.add(torch.bmm(dscores.mT, queries), batch)
            value_grad.add(torch.bmm(weights.mT, grad), batch)
            del weights, dscores
        restore(rows.mul_(call.scale), part.plan, part.of(dq))
        key_grad.write(part.of(dk))
        value_grad.write(part.of(dv))
        sums.add_to(*dbias)
    dbias = [None if g is None or b is None else g.to(b.dtype) for g, b in zip(dbias, call.bias)]
    return dq, dk, dv, *dbias


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to use for scores and sums: float64 if x is float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def score_limit(x: Tensor) -> int:
    """Return SCORE_BYTES of the device of x."""
    return SCORE_BYTES.get(x.device.type, SCORE_BYTES["cpu"])


def may_have_empty(call: Call, plan: Plan) -> bool:
    """Return whether a query may attend to no key. This is impossible with global tokens."""
    return call.num_global == 0 and (call.valid_hw is not None or plan.has_blind)


def divide(x: Tensor, plan: Plan, num_global: int = 0) -> Tensor:
    """Copy tokens (B, N, G+L, D), the local ones row-major, to chunk order: (B, N, G+Q*W, D)."""
    tiles = to_tiles(x[:, :, num_global:], plan.window, plan.sides)
    result = x.new_empty(*x.shape[:2], num_global + tiles.shape[2:6].numel(), x.shape[3])
    result[:, :, :num_global] = x[:, :, :num_global]
    result[:, :, num_global:].unflatten(2, tiles.shape[2:6]).copy_(tiles)
    return result


def restore(x: Tensor, plan: Plan, result: Tensor) -> None:
    """Write Q chunks of W tokens, (B, N, Q, W, D), to `result` (B, N, L, D), row-major tokens."""
    tiles = x.unflatten(3, plan.sides).unflatten(2, plan.window.chunks)
    if plan.is_even:
        to_tiles(result, plan.window, plan.sides).copy_(tiles)  # a view
    else:
        result.copy_(from_tiles(tiles, plan.window))


def gather(x: Tensor, batch: "Batch") -> Tensor:
    """Select the query chunks of a batch from x (b, n, Q, W, D). Returns (h, M*W, D)."""
    tokens = x.flatten(0, 2).index_select(0, batch.queries)
    return tokens.flatten(0, 1).unflatten(0, (batch.num_blocks, -1))


def add_at(x: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values[i] to x[index[i]], for indices that may repeat, in a fixed order."""
    if x.is_cuda:  # where the order of `index_add_` varies
        x.index_put_((index,), values, accumulate=True)
    else:
        x.index_add_(0, index, values)


class Batch(NamedTuple):
    """p blocks of a `ListGroup`, computed together for the b images and n heads of a `Part`.

    queries (b*n*p*M,): indices of the query chunks in the flattened dimensions (image, head,
    chunk).
    keys (b*n*p*J,): indices of the J key chunks of each block, in the same dimensions.
    tokens (b*n*p*T,): indices of the T keys of each block in the flattened dimensions (image, head,
    token) of `Part.k`.
    chunks (p, J): indices of the key chunks among the Q chunks.
    steps (p or 1, M, J): their displacements, see `ListGroup`.
    added (n or 1, p or 1, M*W, T): what to add to the scores: the bias, and the most negative
    finite number for masked keys. None if there is nothing to add.
    """

    queries: Tensor
    keys: Tensor
    tokens: Tensor
    chunks: Tensor
    steps: Tensor
    added: Tensor | None

    @property
    def num_blocks(self) -> int:
        """h, the number of blocks of all images and heads."""
        return len(self.queries) // self.steps.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Numbers that determine the memory that the batch needs."""
        return len(self.queries), len(self.keys)


def put(x: Tensor, values: Tensor, batch: Batch) -> None:
    """Write `values` (h, M*W, ..) to x (b, n, Q, W, ..) at the query chunks of a batch."""
    values = values.flatten(0, 1).unflatten(0, (len(batch.queries), -1))
    x.flatten(0, 2).index_copy_(0, batch.queries, values)


class Part:
    """Some images and heads of a call, with their tokens in chunk order.

    call: the call, restricted to these images and heads. groups: those of its heads.
    q (b, n, Q, W, D), k, v (b, n, G+Q*W, D): the tokens in chunk order, the global ones first.
    tiles (n, W, S, W): the bias of the W tokens of a query chunk toward those of a key chunk at
    each displacement in `plan.steps`; None without a table. index: `plan.bias_index()`, for their
    gradient.
    """

    def __init__(
        self,
        call: Call,
        plan: Plan,
        images: slice,
        heads: slice,
        index: Tensor | None,
        tiles: Tensor | None,
    ) -> None:
        q, k, v = (x[images, heads] for x in call[:3])
        valid_hw = None if call.valid_hw is None else call.valid_hw[images]
        self.call = call._replace(q=q, k=k, v=v, valid_hw=valid_hw)
        self.plan, self.images, self.heads = plan, images, heads
        self.num_global, self.dtype = call.num_global, wide(q)
        self.groups = [group for group in plan.groups if group.head in (None, heads.start)]
        self.q = divide(q, plan).unflatten(2, (-1, plan.tile))
        self.k, self.v = (divide(x, plan, call.num_global) for x in (k, v))
        self.index, self.tiles = index, tiles
        to_global = call.bias.to_global
        self.to_global = None if to_global is None else to_global[heads].to(self.dtype)
        self.padding = None
        if valid_hw is not None:
            real = real_cells(valid_hw.to(q.device), plan.window.grid).flatten(2)
            self.padding = ~divide(real[..., None], plan)[:, 0, :, 0].unflatten(1, (-1, plan.tile))

    def of(self, x: Tensor) -> Tensor:
        """Select the images and heads of this part from a tensor (B, N, ..)."""
        return x[self.images, self.heads]

    def batches(self) -> Iterator[Batch]:
        """Yield batches of the part's blocks. Query chunks without keys are skipped."""
        (b, n, num_chunks, tile), device = self.q.shape[:4], self.q.device
        part = torch.arange(b * n, device=device)[:, None]
        first, first_token = part * num_chunks, part * self.k.shape[2]
        inside = self.num_global + torch.arange(tile, device=device)  # of the first chunk
        common = torch.arange(self.num_global, device=device)
        for group in self.groups:
            num_keys = self.num_global + group.keys.shape[1] * tile
            if not num_keys:
                continue
            added = self._added(group.steps, group.hidden) if len(group.steps) == 1 else None
            size = group.queries.shape[1] * tile * num_keys * self.dtype.itemsize
            limit = score_limit(self.q) // (b * n * size)
            for span in split_evenly(len(group.queries), limit):
                steps, hidden = group.steps, group.hidden
                if len(steps) > 1:
                    steps, hidden = steps[span], None if hidden is None else hidden[span]
                    added = self._added(steps, hidden)
                chunks = group.keys[span]
                queries = (first + group.queries[span].flatten()).flatten()
                keys = (first + chunks.flatten()).flatten()
                local = (chunks[..., None] * tile + inside).flatten(1)
                tokens = torch.cat([common.expand(len(chunks), -1), local], 1)  # (p, T)
                tokens = (first_token + tokens.flatten()).flatten()
                yield Batch(queries, keys, tokens, chunks, steps, added)

    def _added(self, steps: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Return `Batch.added` for blocks with these displacements and masks."""
        if self.tiles is None and self.to_global is None and hidden is None:
            return None
        if self.tiles is None:
            (count, num_queries, num_keys), tile = steps.shape, self.plan.tile
            shape = (1, count, num_queries * tile, num_keys * tile)
            local = self.q.new_zeros(shape, dtype=self.dtype)
        else:
            local = self.tiles.index_select(2, steps.flatten()).unflatten(2, steps.shape)
            local = local.movedim(1, 3).flatten(4).flatten(2, 3)  # of (n, p, M, W, J, W)
        if hidden is not None:
            local.masked_fill_(hidden, torch.finfo(self.dtype).min)
        if not self.num_global:
            return local
        first = local.new_zeros(1, 1, 1, self.num_global)
        if self.to_global is not None:
            first = self.to_global[:, None, None]
        shape = (max(len(first), len(local)), *local.shape[1:3], -1)
        return torch.cat([first.expand(shape), local.expand(shape)], 3)

    def queries(self, batch: Batch) -> Tensor:
        """Return the queries (h, M*W, D) of a batch, times the scale."""
        return gather(self.q, batch).mul_(self.call.scale)

    def keys(self, batch: Batch) -> Tensor:
        """Return the keys (h, T, D) of a batch: T for each of its h blocks."""
        return self._gather_tokens(self.k, batch)

    def values(self, batch: Batch) -> Tensor:
        """Return the values (h, T, D) of a batch: T for each of its h blocks."""
        return self._gather_tokens(self.v, batch)

    def _gather_tokens(self, x: Tensor, batch: Batch) -> Tensor:
        tokens = x.flatten(0, 2).index_select(0, batch.tokens)
        return tokens.unflatten(0, (batch.num_blocks, -1))

    def scores(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (h, M*W, T) of a batch of h blocks.

        queries (h, M*W, D), keys (h, T, D). The scores include the bias. Masked scores are about
        the most negative finite number.
        """
        scores = torch.bmm(queries, keys.mT).to(self.dtype)
        by_chunk = scores.unflatten(0, (*self.q.shape[:2], -1))  # (b, n, p, M*W, T)
        if batch.added is not None:
            by_chunk.add_(batch.added)
        if self.padding is not None and batch.chunks.shape[1]:
            padding = self.padding[:, batch.chunks].flatten(2)[:, None, :, None]
            local = by_chunk[..., self.num_global :]
            local.masked_fill_(padding, torch.finfo(self.dtype).min)
        return scores


def split_call(call: Call) -> Iterator[Part]:
    """Split a call into `Part`s with a few images and heads each, to limit memory.

    The q of a part has at most PART_BYTES, and its bias at most BIAS_BYTES. The scores of one
    block, for all images and heads of the part, have at most SCORE_BYTES. A part may exceed a limit
    if it cannot be split further. Heads with different patterns are in different parts.
    """
    (images, heads, length, dim), itemsize = call.q.shape, wide(call.q).itemsize
    plan = make_plan(call.window, call.q.device)
    sizes = [(g.queries.shape[1], g.keys.shape[1]) for g in plan.groups]
    scores = max(m * plan.tile * (call.num_global + j * plan.tile) for m, j in sizes)
    score_bytes = max(1, scores * itemsize)
    part_bytes = PART_BYTES.get(call.q.device.type, PART_BYTES["cpu"])
    limit = min(part_bytes // (length * dim * call.q.itemsize), score_limit(call.q) // score_bytes)
    by_image = split_evenly(images, limit)
    head_limit = 1 if plan.groups[0].head is not None else limit // by_image[0].stop
    if call.bias.table is not None:
        head_limit = min(head_limit, BIAS_BYTES // (len(plan.steps) * plan.tile**2 * itemsize + 1))
    table, tiles = call.bias.table, None
    index = None if table is None else plan.bias_index().to(table.device)
    for some in split_evenly(heads, head_limit):
        if table is not None and index is not None:
            tiles = table[some].to(wide(call.q)).index_select(1, index.flatten())
            tiles = tiles.unflatten(1, index.shape)
        for image in by_image:
            yield Part(call, plan, image, some, index, tiles)


def split_evenly(count: int, limit: int) -> list[slice]:
    """Split `count` elements into as few ranges of at most `limit` as possible, all about as long.

    A limit below 1 counts as 1.
    """
    size = -(-count // -(-count // max(1, limit)))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class KeyGrad:
    """Sums the gradient (b, n, G+L, D) of the keys or values of a `Part` over its batches."""

    def __init__(self, part: Part) -> None:
        self.plan, self.num_global = part.plan, part.num_global
        self.first = torch.zeros_like(part.k[:, :, : part.num_global], dtype=part.dtype)
        self.chunks = torch.zeros_like(part.q, dtype=part.dtype)

    def add(self, grad: Tensor, batch: Batch) -> None:
        """Add the gradient (h, T, D) of the keys of h blocks."""
        first, local = grad.to(self.first.dtype).tensor_split([self.num_global], 1)
        self.first += first.unflatten(0, (*self.first.shape[:2], -1)).sum(2)
        local = local.reshape(-1, *self.chunks.shape[3:])
        add_at(self.chunks.flatten(0, 2), batch.keys, local)

    def write(self, result: Tensor) -> None:
        """Write the sum to `result` (b, n, G+L, D): global, then row-major local tokens."""
        result[:, :, : self.num_global] = self.first
        restore(self.chunks, self.plan, result[:, :, self.num_global :])


class BiasSums:
    """The gradient of the bias of n heads, summed over the images and query chunks of a `Part`.

    tiles (n, W, S, W), first (n, G): gradients of `Part.tiles` and `Part.to_global`; None without
    such a bias.
    """

    def __init__(self, part: Part) -> None:
        self.part, self.num_global = part, part.num_global
        self.tiles, self.first = (
            None if x is None else torch.zeros_like(x) for x in (part.tiles, part.to_global)
        )

    def add(self, dscores: Tensor, batch: Batch) -> None:
        """Add the gradient of the scores (h, M*W, T) of a batch of h blocks."""
        if self.tiles is None and self.first is None:
            return
        lanes = dscores.unflatten(0, (*self.part.q.shape[:2], -1))  # (b, n, p, M*W, T)
        if len(batch.steps) == 1:  # one sum over both dimensions takes far longer
            lanes = lanes.sum(2, keepdim=True)
        first, local = lanes.sum(0).tensor_split([self.num_global], 3)
        if self.first is not None:
            self.first += first.sum((1, 2))
        if self.tiles is not None and batch.steps.numel():
            tile = self.part.plan.tile
            local = local.unflatten(3, (-1, tile)).unflatten(2, (-1, tile))  # (n, p, M, W, J, W)
            local = local.permute(1, 2, 4, 0, 3, 5).flatten(0, 2)
            add_at(self.tiles.movedim(2, 0), batch.steps.flatten(), local)

    def add_to(self, table: Tensor | None, to_global: Tensor | None) -> None:
        """Add the sums to the gradients of all heads: of the bias table and of `to_global`."""
        index = self.part.index
        if table is not None and index is not None and self.tiles is not None:
            add_at(table[self.part.heads].mT, index.flatten(), self.tiles.flatten(1).mT)
        if to_global is not None and self.first is not None:
            to_global[self.part.heads] += self.first


attend = declare_attention("blocked", forward, backward)
