"""Attention with a pattern's `Layout`, computed for a few query chunks at a time.

The scores of these query chunks fit into the CPU cache. A query chunk may have any list of key
chunks, see layout_plan.py. The backward pass recomputes the scores. A call is split into parts with
a few images and heads each, so that copies of their tokens also stay in the cache.

Shapes: B batch, N heads, L tokens, G global tokens, D channels, Q chunks of W = w*w tokens, S
displacements between chunks.
In a `ListGroup`: P query chunks with J key chunks each.
In a `Part`: b images and n heads.
In a `Batch`: p query chunks of a group, h = b*n*p query chunks of all images and heads of the part,
T = G + J*W keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.backends.chunk_layout import from_chunks, to_chunks
from vil.ops.backends.layout_plan import ListGroup, Plan, make_plan
from vil.ops.backends.scratch import BATCH_BYTES, Scratch, even_share, split_range, wide
from vil.ops.call import Call, Gradients
from vil.ops.layout import Layout
from vil.ops.window import real_cells

PART_BYTES = 1 << 22  # q of a part; its keys and values then fit into the cache
BIAS_BYTES = 1 << 24  # bias of all displacements between chunks, for the heads of a part
softmax_backward = torch.ops.aten._softmax_backward_data.out  # (dout - sum(dout out)) out


class Batch(NamedTuple):
    """p query chunks of a `ListGroup`, computed together for the b images and n heads of a `Part`.

    span: range of the p query chunks in the group.
    queries (b*n*p,): indices of the query chunks in the flattened dimensions (image, head, chunk).
    keys (b*n*p*J,): indices of the J key chunks of each query chunk, in the same dimensions.
    """

    group: ListGroup
    span: slice
    queries: Tensor
    keys: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Select x[i] for each query chunk i of the batch.

        x: a tensor whose first dimension is the query chunks of the `ListGroup`. If this dimension
        is 1, x applies to all query chunks and is returned unchanged.
        """
        return x if len(x) == 1 else x[self.span]


class Part(NamedTuple):
    """Some images and heads of a call, so few that copies of their tokens fit into the CPU cache.

    call: the call, restricted to these images and heads. plan: which chunks these heads attend to.
    bias: the bias of these heads, see `expand_bias`.
    """

    images: slice
    heads: slice
    call: Call
    plan: Plan
    bias: tuple[Tensor, Tensor] | None

    def of(self, x: Tensor) -> Tensor:
        """Select the images and heads of this part from a tensor (B, N, ..)."""
        return x[self.images, self.heads]


def split_call(call: Call) -> Iterator[Part]:
    """Split a call into `Part`s with a few images and heads each, to limit memory.

    The q of a part has at most PART_BYTES, and its bias at most BIAS_BYTES. The scores of one query
    chunk, for all images and heads of the part, have at most BATCH_BYTES. A part may exceed a limit
    if it cannot be split further. Heads with different patterns are in different parts.
    """
    (images, heads, length, dim), layout = call.q.shape, call.window
    plan = make_plan(layout, call.q.device)
    most_keys = call.num_global + max(g.keys.shape[1] for g in plan.groups) * layout.tile
    score_bytes = max(1, layout.tile * most_keys * wide(call.q).itemsize)
    limit = min(PART_BYTES // (length * dim * call.q.itemsize), BATCH_BYTES // score_bytes)
    num_images = even_share(images, limit)
    num_heads = 1 if layout.heads > 1 else even_share(heads, limit // num_images)
    if call.bias.table is not None:
        size = len(plan.steps) * layout.tile**2 * wide(call.q).itemsize
        num_heads = even_share(num_heads, BIAS_BYTES // max(1, size))
    for some in split_range(slice(0, heads), num_heads):
        bias = expand_bias(call, some, plan)
        groups = tuple(group for group in plan.groups if group.head in (None, some.start))
        for image in split_range(slice(0, images), num_images):
            q, k, v = (x[image, some] for x in (call.q, call.k, call.v))
            valid_hw = None if call.valid_hw is None else call.valid_hw[image]
            part = call._replace(q=q, k=k, v=v, valid_hw=valid_hw)
            yield Part(image, some, part, plan._replace(groups=groups), bias)


def expand_bias(call: Call, heads: slice, plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Return the bias of n heads as tensors (n, S, W, W) and (n, G); None without a bias.

    The first tensor is for local keys. For each of the S chunk displacements in `plan.steps`, it
    has the bias of the W tokens of a query chunk toward the W tokens of a key chunk. The second
    tensor is the bias toward G global tokens.
    """
    table, to_global = call.bias
    if table is None and to_global is None:
        return None
    count, tile = heads.stop - heads.start, call.window.tile
    like = dict(dtype=wide(call.q), device=call.q.device)
    tiles = torch.zeros(count, 1, 1, 1, **like).expand(-1, len(plan.steps), tile, tile)
    if table is not None:
        index = bias_index(call.window, plan.steps).to(table.device)
        tiles = table[heads].to(like["dtype"]).index_select(1, index.flatten())
        tiles = tiles.unflatten(1, index.shape)
    first = torch.zeros(count, call.num_global, **like)
    return tiles, first if to_global is None else to_global[heads].to(like["dtype"])


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output (B, N, L, D), and the log-sum-exp of each query's scores (B, N, L)."""
    q, layout, scratch = call.q, call.window, Scratch(call.q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q))
    least = torch.finfo(lse.dtype).min
    for part in split_call(call):
        scores_of = Scores(part, scratch)
        keys, values = (Keys(x, part, scratch) for x in (part.call.k, part.call.v))
        rows = scores_of.new_rows()
        top = torch.full(rows.shape[:-1], least, dtype=lse.dtype, device=q.device)
        largest = torch.ones_like(top)
        for batch in scores_of.batches():
            queries = gather(scores_of.q, batch.queries)
            scores = scores_of.compute(batch, queries, keys.gather(batch))
            put(top, scores.amax(-1), batch)
            weights = torch.softmax(scores, -1, out=scores)
            if call.needs_lse:
                put(largest, weights.amax(-1), batch)
            put(rows, torch.bmm(scratch.cast(weights, q.dtype), values.gather(batch)), batch)
        empty = top == least
        stat = (top - largest.log_()).masked_fill_(empty, -torch.inf)
        if empty.any():
            rows.masked_fill_(empty[..., None], 0.0)
        part.of(out).copy_(restore(rows, layout))
        part.of(lse).copy_(restore(stat[..., None], layout)[..., 0])
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases. dout: the gradient of the output.

    `lse` (log-sum-exp of the scores) is used only to find queries without keys. `out` is not used.
    """
    layout, scratch, other = call.window, Scratch(call.q), Scratch(call.q)
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    bias = BiasGrad(call)
    for part in split_call(call):
        scores_of = Scores(part, scratch)
        keys, values = Keys(part.call.k, part, other), Keys(part.call.v, part, scratch)
        grads = divide(part.of(dout), layout)
        empty = part.of(lse) == -torch.inf
        if empty.any():
            grads.masked_fill_(divide(empty[..., None], layout), 0.0)
        rows, bias_sums = scores_of.new_rows(), BiasSums(part)
        key_sums, value_sums = (KVGrad(x, part, scratch) for x in (part.call.k, part.call.v))
        for batch in scores_of.batches():
            queries, grad = (gather(x, batch.queries) for x in (scores_of.q, grads))
            some = keys.gather(batch)
            weights = scores_of.compute(batch, queries, some)
            weights = torch.softmax(weights, -1, out=weights)
            dscores = other.matmul(grad, values.gather(batch).mT)
            softmax_backward(dscores, weights, -1, dscores.dtype, grad_input=dscores)
            bias_sums.add(dscores, batch)
            weights, dscores = (
                s.cast(x, grad.dtype) for s, x in ((scratch, weights), (other, dscores))
            )
            put(rows, torch.bmm(dscores, some), batch)
            key_sums.add(dscores, queries, batch)
            value_sums.add(weights, grad, batch)
        part.of(dq).copy_(restore(rows.mul_(call.scale), layout))
        key_sums.write(part.of(dk))
        value_sums.write(part.of(dv))
        bias.add(bias_sums, part)
    return dq, dk, dv, *bias.result()


def divide(x: Tensor, layout: Layout) -> Tensor:
    """Copy row-major tokens (B, N, L, D) to chunk order: Q chunks of W tokens, (B, N, Q, W, D)."""
    chunks = to_chunks(x, layout).flatten(2, 3)
    return chunks.clone(memory_format=torch.contiguous_format)


def restore(x: Tensor, layout: Layout) -> Tensor:
    """Reorder Q chunks of W tokens, (B, N, Q, W, D), to row-major tokens (B, N, L, D)."""
    return from_chunks(x.unflatten(2, layout.chunks), layout)


def gather(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Select chunks of W tokens from x (b, n, Q, W, D). Returns (len(rows), W, D).

    rows: indices of the chunks in the flattened first three dimensions of x. out: a tensor that the
    result is written to; None for new memory.
    """
    flat = x.flatten(0, 2).flatten(1)
    index = rows[:, None].expand(-1, flat.shape[1])
    out = None if out is None else out.view(index.shape)
    return torch.gather(flat, 0, index, out=out).view(-1, *x.shape[3:])


def put(x: Tensor, values: Tensor, batch: Batch) -> None:
    """Write `values` (h, W, ..) to x (b, n, Q, W, ..) at the h query chunks of a batch.

    x has all Q chunks of W tokens, for each of b images and n heads.
    """
    x.flatten(0, 2).index_copy_(0, batch.queries, values)


class Keys:
    """The keys or values (b, n, G+L, D) of a `Part`. `gather` copies those of a batch of chunks."""

    def __init__(self, x: Tensor, part: Part, scratch: Scratch) -> None:
        self.num_global, self.scratch = part.call.num_global, scratch
        self.first = x[:, :, : self.num_global]
        self.chunks = divide(x[:, :, self.num_global :], part.call.window)

    def gather(self, batch: Batch) -> Tensor:
        """Copy the keys of a batch to (h, T, D): T keys for each of its h query chunks.

        The global tokens come first.
        """
        (b, n, _, w, dim), h, dtype = self.chunks.shape, len(batch.queries), self.chunks.dtype
        local = self.scratch.take("chunks", (len(batch.keys), w, dim), dtype)
        local = gather(self.chunks, batch.keys, local).view(h, batch.group.keys.shape[1] * w, dim)
        if not self.num_global:
            return local
        keys = self.scratch.take("keys", (h, self.num_global + local.shape[1], dim), dtype)
        keys[:, self.num_global :] = local
        keys.view(b, n, -1, *keys.shape[1:])[..., : self.num_global, :] = self.first[:, :, None]
        return keys


class KVGrad:
    """Sums the gradient (b, n, G+L, D) of the keys or values of a `Part` over its batches."""

    def __init__(self, x: Tensor, part: Part, scratch: Scratch) -> None:
        self.layout, self.num_global = part.call.window, part.call.num_global
        self.scratch = scratch
        (b, n, _, dim), dtype = x.shape, wide(x)
        chunks = math.prod(self.layout.chunks)
        self.first = x.new_zeros(b, n, self.num_global, dim, dtype=dtype)
        self.chunks = x.new_zeros(b, n, chunks, self.layout.tile, dim, dtype=dtype)

    def add(self, left: Tensor, right: Tensor, batch: Batch) -> None:
        """Add the contribution of a batch of h query chunks: left.mT @ right (h, T, D).

        For keys, left (h, W, T) is the gradient of the scores, and right (h, W, D) the queries. For
        values, left is the attention weights, and right the gradient of the output.
        """
        grad = self.scratch.take("grad", (*left.mT.shape[:2], right.shape[2]), right.dtype)
        grad = torch.bmm(left.mT, right, out=grad).to(self.chunks.dtype)
        if self.num_global:
            to_global, grad = grad.tensor_split([self.num_global], 1)
            self.first += to_global.unflatten(0, (*self.first.shape[:2], -1)).sum(2)
        flat = self.chunks.view(-1, self.chunks.shape[3:].numel())
        flat.index_add_(0, batch.keys, grad.reshape(len(batch.keys), flat.shape[1]))

    def write(self, result: Tensor) -> None:
        """Write the gradient to `result` (b, n, G+L, D): global tokens, then row-major local
        tokens."""
        result[:, :, : self.num_global] = self.first
        result[:, :, self.num_global :] = restore(self.chunks, self.layout)


class Scores:
    """Computes attention scores (q k^T, plus bias and mask) for one batch of a `Part` at a time."""

    def __init__(self, part: Part, scratch: Scratch) -> None:
        call, self.part, self.scratch = part.call, part, scratch
        self.num_global, self.dtype = call.num_global, wide(call.q)
        self.q = divide(call.q, call.window).mul_(call.scale)
        self.least = torch.finfo(self.dtype).min
        self.padding = self._padding()
        self.added: Tensor | None = None  # result of `_added` for the current group

    def batches(self) -> Iterator[Batch]:
        """Yield batches of the part's query chunks. Query chunks without keys are skipped."""
        (b, n, num_chunks), tile = self.q.shape[:3], self.part.call.window.tile
        first = torch.arange(b * n, device=self.q.device)[:, None] * num_chunks
        for group in self.part.plan.groups:
            num_keys = self.num_global + group.keys.shape[1] * tile
            if not num_keys:
                continue
            self.added = self._added(group)
            count = len(group.queries)
            limit = BATCH_BYTES // (b * n * tile * num_keys * self.dtype.itemsize)
            for span in split_range(slice(0, count), even_share(count, limit)):
                rows = ((first + x[span].flatten()).flatten() for x in (group.queries, group.keys))
                yield Batch(group, span, *rows)

    def new_rows(self) -> Tensor:
        """Return a tensor (b, n, Q, W, D) to which each batch writes its results.

        It is initialized with 0 if a query chunk has no keys, because such chunks are in no batch.
        """
        groups = [g for g in self.part.plan.groups if self.num_global + g.keys.shape[1]]
        is_complete = sum(len(group.queries) for group in groups) == self.q.shape[2]
        return torch.empty_like(self.q) if is_complete else torch.zeros_like(self.q)

    def compute(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (h, W, T) of h query chunks with W queries and T keys each.

        queries (h, W, D), keys (h, T, D). The scores include the bias. Masked scores are set to the
        most negative finite number.
        """
        scores = self.scratch.matmul(queries, keys.mT)
        group, num_global = batch.group, self.num_global
        by_head = scores.view(*self.q.shape[:2], -1, *scores.shape[1:])  # (b, n, p, W, T)
        if self.added is not None:
            by_head.add_(self.added)
        else:
            self._add_bias(by_head, batch)
            if group.hidden is not None:
                by_head[..., num_global:].masked_fill_(batch.take(group.hidden), self.least)
        if self.padding is not None and group.keys.shape[1]:
            padding = self.padding[:, group.keys[batch.span]].flatten(2)
            if padding.any():
                by_head[..., num_global:].masked_fill_(padding[:, None, :, None], self.least)
        return scores

    def _added(self, group: ListGroup) -> Tensor | None:
        """Return the bias (n, 1, W, T) that all query chunks of a group share: W queries, T keys.

        It includes the mask: masked keys get the most negative finite number. Returns None if there
        is no bias, or if the query chunks do not share the same bias and mask.
        """
        if self.part.bias is None or len(group.steps) > 1:
            return None
        table, to_global = self.part.bias
        local = table[:, group.steps].transpose(2, 3).flatten(3)  # (n, 1, W, J*W)
        if group.hidden is not None:
            local.masked_fill_(group.hidden, self.least)
        return torch.cat([to_global[:, None, None].expand(*local.shape[:3], -1), local], -1)

    def _add_bias(self, scores: Tensor, batch: Batch) -> None:
        """Add the bias, if there is one, to the scores (b, n, p, W, T) of a batch.

        The dimensions are images, heads, query chunks, queries of a chunk, and their keys.
        """
        if self.part.bias is None:
            return
        table, to_global = self.part.bias
        if self.num_global:
            scores[..., : self.num_global] += to_global[:, None, None]
        if batch.group.steps.shape[1]:
            tiles = table[:, batch.take(batch.group.steps)].transpose(2, 3)  # (n, p, W, J, W)
            scores[..., self.num_global :].unflatten(4, tiles.shape[3:]).add_(tiles)

    def _padding(self) -> Tensor | None:
        """Return a bool mask that is True for padding tokens; None without `valid_hw`. The mask is
        (b, Q, W), for b images with Q chunks of W tokens each."""
        valid_hw, layout = self.part.call.valid_hw, self.part.call.window
        if valid_hw is None:
            return None
        real = real_cells(valid_hw.to(self.q.device), layout.grid).flatten(2)
        return ~divide(real[..., None], layout)[:, 0, :, :, 0]


def bias_index(layout: Layout, steps: Tensor) -> Tensor:
    """Return int64 indices (S, W, W) into the bias table for S pairs of chunks of W tokens.

    Entry (s, i, j) is for query token i and key token j of pair s. steps (S, 2): displacement of
    each pair, query chunk minus key chunk, in rows and columns of chunks.
    """
    inside = torch.arange(layout.tile)
    rows, cols = inside // layout.size, inside % layout.size
    displacement = [
        step[:, None, None] * layout.size + line[:, None] - line
        for step, line in zip(steps.unbind(1), (rows, cols))
    ]
    return layout.bias_index(*displacement)


class BiasSums:
    """The gradient of the bias of n heads, summed over the images and query chunks of a `Part`.

    tiles (n, S, W, W), first (n, G): gradients of the two tensors that `expand_bias` returns; None
    if the call has no such bias.
    """

    def __init__(self, part: Part) -> None:
        call, heads = part.call, part.call.q.shape[1]
        (table, to_global), tile, self.num_global = call.bias, call.window.tile, call.num_global
        self.num_heads = heads
        shapes = (heads, len(part.plan.steps), tile, tile), (heads, self.num_global)
        self.tiles, self.first = (
            None if bias is None else call.q.new_zeros(shape, dtype=wide(call.q))
            for bias, shape in zip((table, to_global), shapes)
        )

    def add(self, dscores: Tensor, batch: Batch) -> None:
        """Add the contribution of a batch of h query chunks.

        dscores (h, W, T): the gradient of the scores, for W queries and T keys per query chunk.
        """
        if self.tiles is None and self.first is None:
            return
        n, p, tile = self.num_heads, batch.span.stop - batch.span.start, dscores.shape[1]
        sums = dscores.unflatten(0, (-1, n, p)).sum(0)  # (n, p, W, T)
        if self.first is not None:
            self.first += sums[..., : self.num_global].sum((1, 2))
        steps = batch.take(batch.group.steps)
        if self.tiles is not None and steps.shape[1]:
            local = sums[..., self.num_global :]
            local = local.sum(1, keepdim=True) if len(steps) == 1 else local
            local = local.unflatten(3, (-1, tile)).transpose(2, 3).flatten(1, 2)  # (n, p*J, W, W)
            self.tiles.index_add_(1, steps.flatten(), local)


class BiasGrad:
    """The gradient of the bias of a call with N heads.

    table (N, entries): the gradient of the relative position bias table; None without a table.
    to_global (N, G): the gradient of the bias toward G global tokens; None without this bias.
    """

    def __init__(self, call: Call) -> None:
        self.bias = call.bias
        self.table, self.to_global = (
            None if x is None else torch.zeros_like(x, dtype=wide(call.q)) for x in call.bias
        )

    def add(self, sums: BiasSums, part: Part) -> None:
        """Add the gradient `sums` of one part to the gradient of the call."""
        if self.table is not None:
            index = bias_index(part.call.window, part.plan.steps).to(self.table.device)
            self.table[part.heads].index_add_(1, index.flatten(), sums.tiles.flatten(1))
        if self.to_global is not None:
            self.to_global[part.heads] += sums.first

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the bias table and of the bias toward global tokens."""
        grads = (self.table, self.to_global)
        return tuple(g if g is None else g.to(b.dtype) for g, b in zip(grads, self.bias))
