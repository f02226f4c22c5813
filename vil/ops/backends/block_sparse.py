"""Attention of a layout in batches of a few query chunks, whose scores fit into the CPU cache.

Like blocked.py, but with any list of key chunks per query chunk. The forward pass saves its output
and the log-sum-exp of every row; the backward pass recomputes the scores. Query chunks with equally
many key chunks form a group. If their lists also have equal displacements and masks, as those in
the interior of a local pattern, the bias and the mask are computed once for all of them.

Shapes: B batch, N heads, L tokens, G global tokens, D channels, Q chunks of W = w*w tokens, S
displacements between chunks. In a group: P query chunks with J key chunks each. In a batch: b
images, n heads, p query chunks, T = G + J*W keys, h = b*n*p.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.backends.chunk_layout import from_chunks, to_chunks
from vil.ops.backends.scratch import BATCH_BYTES, Scratch, even_share, split_range, wide
from vil.ops.call import Call, Gradients
from vil.ops.layout import FULL, ChunkLists, Layout
from vil.ops.window import real_cells
from vil.utils.transforms import untraced

MIN_EQUAL = 4  # query chunks with equal lists that are worth a group of their own
BIAS_BYTES = 1 << 24  # of the bias of all displacements, which some heads share
softmax_backward = torch.ops.aten._softmax_backward_data.out  # (dout - sum(dout out)) out


class ListGroup(NamedTuple):
    """Query chunks with J key chunks each.

    head: the head they belong to; None if all heads have the same lists. queries (P,),
    keys (P, J): indices of chunks. hidden (P or 1, W, J*W) bool: whether a key token is hidden from
    a query token; None if none is. steps (P or 1, J): indices into `Plan.steps`, the displacement
    of each pair of query and key chunk.
    """

    head: int | None
    queries: Tensor
    keys: Tensor
    hidden: Tensor | None
    steps: Tensor


class Plan(NamedTuple):
    """The groups of a layout. steps (S, 2): displacements (rows, columns) of chunks, in chunks."""

    groups: tuple[ListGroup, ...]
    steps: Tensor


class Batch(NamedTuple):
    """Part of a group: the query chunks in the slice `part`, for some images and heads."""

    group: ListGroup
    images: slice
    heads: slice
    part: slice

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of a group's tensor (P or 1, ..) that belong to the batch."""
        return x if len(x) == 1 else x[self.part]


@lru_cache(maxsize=64)
@untraced
def make_plan(layout: Layout, device: torch.device) -> Plan:
    """Divide the query chunks of a layout into groups."""
    lists, (rows, cols) = layout.lists, layout.chunks
    displacement = [lists.query // cols - lists.key // cols, lists.query % cols - lists.key % cols]
    steps, step = torch.stack(displacement, 1).unique(dim=0, return_inverse=True)
    kinds = torch.stack([step, lists.mask], 1)
    sizes = (lists.head * rows * cols + lists.query).bincount(minlength=layout.heads * rows * cols)
    first = sizes.cumsum(0) - sizes
    groups = []
    for head, of_head in enumerate(sizes.split(rows * cols)):
        for num_keys in of_head.unique().tolist():
            queries = (of_head == num_keys).nonzero()[:, 0]
            pairs = first[head * rows * cols + queries, None] + torch.arange(num_keys)  # (P, J)
            for some, is_equal in _split_equal(kinds[pairs].flatten(1)):
                shared = pairs[some[:1]] if is_equal else pairs[some]
                hidden = _hidden_pairs(lists, shared)
                tensors = (queries[some], lists.key[pairs[some]], hidden, step[shared])
                tensors = (x if x is None else x.to(device) for x in tensors)
                groups.append(ListGroup(head if layout.heads > 1 else None, *tensors))
    return Plan(tuple(groups), steps)


def _hidden_pairs(lists: ChunkLists, pairs: Tensor) -> Tensor | None:
    """Return `hidden` of `ListGroup` for pairs of chunks (P, J): (P, W, J*W) bool or None."""
    masks = lists.mask[pairs]
    if (masks == FULL).all():
        return None
    hidden = torch.cat([~lists.masks, lists.masks.new_zeros(1, *lists.masks.shape[1:])])
    return hidden[masks].transpose(1, 2).flatten(2)  # FULL is the last


def _split_equal(kinds: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Group the rows of `kinds` (P, n). Yield (row indices, whether the rows are equal)."""
    if not kinds.shape[1]:  # chunks without keys
        yield torch.arange(len(kinds)), True
        return
    _, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    for kind in (counts >= MIN_EQUAL).nonzero()[:, 0].tolist():
        yield (which == kind).nonzero()[:, 0], True
    rest = (counts < MIN_EQUAL)[which].nonzero()[:, 0]
    if len(rest):
        yield rest, False


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp, see `vil.ops.custom_op`."""
    q, layout = call.q, call.window
    scratch = Scratch(q)
    scores_of = Scores(call, scratch)
    all_keys, all_values = (Keys(x, call, scratch) for x in (call.k, call.v))
    out = torch.zeros_like(scores_of.q)
    least = torch.finfo(wide(q)).min
    top = q.new_full(out.shape[:-1], least, dtype=wide(q))
    largest = torch.ones_like(top)
    for batch in scores_of.batches():
        scores = scores_of.compute(batch, scores_of.queries(batch), all_keys.gather(batch))
        put(top, scores.amax(-1), batch)
        weights = torch.softmax(scores, -1, out=scores)
        put(largest, weights.amax(-1), batch)
        put(out, torch.bmm(scratch.cast(weights, q.dtype), all_values.gather(batch)), batch)
    empty = top == least
    lse = (top - largest.log()).masked_fill_(empty, -torch.inf)
    out.masked_fill_(empty[..., None], 0.0)
    return restore(out, layout), restore(lse[..., None], layout)[..., 0]


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients. `lse` is used only to find rows without keys, and `out` not at all."""
    q, layout = call.q, call.window
    scratch, other = Scratch(q), Scratch(q)
    scores_of = Scores(call, scratch)
    all_keys, all_values = Keys(call.k, call, other), Keys(call.v, call, scratch)
    grads = divide(dout.masked_fill((lse == -torch.inf)[..., None], 0.0), layout)
    dq = torch.zeros_like(scores_of.q)
    dk, dv, bias = KVGrad(call.k, call), KVGrad(call.v, call), BiasGrad(call, scores_of)
    for batch in scores_of.batches():
        keys, queries = all_keys.gather(batch), scores_of.queries(batch)
        grad = select(grads, batch)
        weights = scores_of.compute(batch, queries, keys)
        weights = torch.softmax(weights, -1, out=weights)
        dscores = other.matmul(grad, all_values.gather(batch).mT)
        softmax_backward(dscores, weights, -1, dscores.dtype, grad_input=dscores)
        bias.add(dscores, batch)
        weights, dscores = scratch.cast(weights, q.dtype), other.cast(dscores, q.dtype)
        put(dq, torch.bmm(dscores, keys).mul_(call.scale), batch)
        dk.add(torch.bmm(dscores.mT, queries), batch)
        dv.add(torch.bmm(weights.mT, grad), batch)
    return restore(dq, layout), dk.close(), dv.close(), *bias.result()


def divide(x: Tensor, layout: Layout) -> Tensor:
    """Reorder (B, N, L, D) to contiguous chunks (B, N, Q, W, D)."""
    return to_chunks(x, layout).flatten(2, 3).contiguous()


def restore(x: Tensor, layout: Layout) -> Tensor:
    """Reorder chunks (B, N, Q, W, D) to (B, N, L, D)."""
    return from_chunks(x.unflatten(2, layout.chunks), layout).contiguous()


def select(x: Tensor, batch: Batch) -> Tensor:
    """Return the query chunks of a batch, from x (B, N, Q, W, D), as (h, W, D)."""
    some = x[batch.images, batch.heads].index_select(2, batch.group.queries[batch.part])
    return some.flatten(0, 2)


def put(x: Tensor, rows: Tensor, batch: Batch) -> None:
    """Write rows (h, W, ..) of the query chunks of a batch to x (B, N, Q, W, ..)."""
    target = x[batch.images, batch.heads]
    index = batch.group.queries[batch.part]
    target.index_copy_(2, index, rows.view(*target.shape[:2], len(index), *target.shape[3:]))


class Keys:
    """Keys or values (B, N, G+L, D), from which the chunks of a batch are gathered."""

    def __init__(self, x: Tensor, call: Call, scratch: Scratch) -> None:
        self.num_global, self.scratch = call.num_global, scratch
        self.first = x[:, :, : call.num_global]
        self.chunks = divide(x[:, :, call.num_global :], call.window)

    def gather(self, batch: Batch) -> Tensor:
        """Copy the keys of a batch to (h, T, D), global tokens first."""
        index = batch.group.keys[batch.part]  # (p, J)
        chunks = self.chunks[batch.images, batch.heads]
        (b, n), (w, dim) = chunks.shape[:2], chunks.shape[3:]
        shape = (b, n, index.numel(), w, dim)
        local = self.scratch.take("chunks", shape, chunks.dtype)
        torch.index_select(chunks, 2, index.flatten(), out=local)
        local = local.view(b, n, len(index), -1, dim)
        if not self.num_global:
            return local.flatten(0, 2)
        size = self.num_global + local.shape[3]
        keys = self.scratch.take("keys", (b, n, len(index), size, dim), chunks.dtype)
        keys[..., : self.num_global, :] = self.first[batch.images, batch.heads, None]
        keys[..., self.num_global :, :] = local
        return keys.flatten(0, 2)


class KVGrad:
    """The gradient of keys or values (B, N, G+L, D), to which batches are added one after the
    other."""

    def __init__(self, x: Tensor, call: Call) -> None:
        self.like, self.layout, self.num_global = x, call.window, call.num_global
        (b, n, _, dim), dtype = x.shape, wide(x)
        chunks = call.window.chunks[0] * call.window.chunks[1]
        self.first = x.new_zeros(b, n, call.num_global, dim, dtype=dtype)
        self.chunks = x.new_zeros(b, n, chunks, call.window.tile, dim, dtype=dtype)

    def add(self, grad: Tensor, batch: Batch) -> None:
        """Add the gradient (h, T, D) of a batch's keys."""
        index = batch.group.keys[batch.part]
        target = self.chunks[batch.images, batch.heads]
        grad = grad.to(target.dtype).unflatten(0, (*target.shape[:2], len(index)))
        if self.num_global:
            self.first[batch.images, batch.heads] += grad[..., : self.num_global, :].sum(2)
        local = grad[..., self.num_global :, :].reshape(*target.shape[:2], -1, *target.shape[3:])
        target.index_add_(2, index.flatten(), local)

    def close(self) -> Tensor:
        """Return the complete gradient."""
        return torch.cat([self.first, restore(self.chunks, self.layout)], 2).to(self.like.dtype)


class Scores:
    """Computes the scores of batches: matmul, bias and mask."""

    def __init__(self, call: Call, scratch: Scratch) -> None:
        self.call, self.layout, self.scratch = call, call.window, scratch
        self.num_global = call.num_global
        self.plan = make_plan(call.window, call.q.device)
        self.q, self.dtype = divide(call.q, call.window), wide(call.q)
        self.least = torch.finfo(self.dtype).min
        self.padding = self._padding()
        self.bias: tuple[Tensor, Tensor] | None = None  # of the current heads, see `_bias`
        self.added: Tensor | None = None  # to the scores of the current group, see `_added`
        self.first_head = 0

    def batches(self) -> Iterator[Batch]:
        """Yield all batches. The bias of the heads in a batch takes at most BIAS_BYTES."""
        (images, heads), layout = self.call.q.shape[:2], self.layout
        share = 1 if layout.heads > 1 else heads
        if self.call.bias.table is not None:
            size = len(self.plan.steps) * layout.tile**2 * self.dtype.itemsize
            share = even_share(share, BIAS_BYTES // size)
        for some in split_range(slice(0, heads), share):
            self.first_head, self.bias = some.start, self._bias(some)
            for group in self.plan.groups:
                keys = self.call.num_global + group.keys.shape[1] * layout.tile
                if keys and group.head in (None, some.start):
                    is_shared = len(group.steps) == 1
                    self.added = self._added(group.steps, group.hidden) if is_shared else None
                    size = layout.tile * keys * self.dtype.itemsize
                    yield from _batches(group, images, some, BATCH_BYTES // size)

    def queries(self, batch: Batch) -> Tensor:
        """Return the scaled queries of a batch, (h, W, D)."""
        return select(self.q, batch).mul_(self.call.scale)

    def compute(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (h, W, T) with bias. Masked keys have the smallest finite number."""
        scores = self.scratch.matmul(queries, keys.mT)
        group, num_global = batch.group, self.num_global
        heads = slice(batch.heads.start - self.first_head, batch.heads.stop - self.first_head)
        lanes = (heads.stop - heads.start, batch.part.stop - batch.part.start)
        by_head = scores.unflatten(0, (-1, *lanes))
        hidden = None if group.hidden is None else batch.take(group.hidden)
        if self.bias is not None:
            added = self.added
            if added is None:
                added = self._added(batch.take(group.steps), hidden)
            by_head.add_(added[heads])
        elif hidden is not None:
            by_head[..., num_global:].masked_fill_(hidden, self.least)
        if self.padding is not None and group.keys.shape[1]:
            padding = self.padding[batch.images][:, group.keys[batch.part]].flatten(2)
            if padding.any():
                by_head[..., num_global:].masked_fill_(padding[:, None, :, None], self.least)
        return scores

    def _added(self, steps: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Return what to add to the scores of the current heads, (n, p or 1, W, T).

        steps (p or 1, J), hidden (p or 1, W, J*W): see `ListGroup`. The bias of masked keys is the
        smallest finite number. Returns None without a bias.
        """
        if self.bias is None:
            return None
        table, to_global = self.bias
        shape = (len(to_global), len(steps), self.layout.tile)
        local = table[:, steps].transpose(2, 3).reshape(*shape, -1)  # (n, p, W, J*W)
        if hidden is not None:
            local = local.masked_fill_(hidden, self.least)
        return torch.cat([to_global[:, None, None].expand(*shape, -1), local], -1)

    def _bias(self, heads: slice) -> tuple[Tensor, Tensor] | None:
        """Return the bias of some heads by displacement of chunks, (n, S, W, W), and by global
        token, (n, G); None without a bias."""
        table, to_global = self.call.bias
        if table is None and to_global is None:
            return None
        count, like = heads.stop - heads.start, dict(dtype=self.dtype, device=self.q.device)
        tiles = torch.zeros(count, 1, 1, 1, **like)
        tiles = tiles.expand(-1, len(self.plan.steps), *[self.layout.tile] * 2)
        if table is not None:
            index = bias_index(self.layout, self.plan.steps).to(table.device)
            tiles = table[heads].to(self.dtype).index_select(1, index.flatten())
            tiles = tiles.unflatten(1, index.shape)
        first = torch.zeros(count, self.num_global, **like)
        return tiles, first if to_global is None else to_global[heads].to(self.dtype)

    def _padding(self) -> Tensor | None:
        """Return which tokens of the chunks are padding of an image, (B, Q, W) bool; None without
        `valid_hw`."""
        if self.call.valid_hw is None:
            return None
        real = real_cells(self.call.valid_hw.to(self.q.device), self.layout.grid).flatten(2)
        return ~divide(real[..., None], self.layout)[:, 0, :, :, 0]


def bias_index(layout: Layout, steps: Tensor) -> Tensor:
    """Return the index into the bias table of each pair of tokens of two chunks, (S, W, W) int64.

    steps (S, 2): displacements of the chunks.
    """
    inside = torch.arange(layout.tile)
    rows, cols = inside // layout.size, inside % layout.size
    displacement = [
        step[:, None, None] * layout.size + line[:, None] - line
        for step, line in zip(steps.unbind(1), (rows, cols))
    ]
    return layout.bias_index(*displacement)


def _batches(group: ListGroup, images: int, heads: slice, limit: int) -> Iterator[Batch]:
    """Yield the batches of a group. Each has at most `limit` query chunks in all of its images and
    heads together, but at least one."""
    count = len(group.queries)
    part = even_share(count, limit)
    n = even_share(heads.stop - heads.start, limit // count)
    b = even_share(images, limit // (count * n))
    for some in split_range(heads, n):
        for image in split_range(slice(0, images), b):
            for span in split_range(slice(0, count), part):
                yield Batch(group, image, some, span)


class BiasGrad:
    """The gradient of the bias, summed over images and chunks.

    It is accumulated as (N, S, W, W) for the table, by displacement of chunks, and as (N, G) for
    global tokens.
    """

    def __init__(self, call: Call, scores: Scores) -> None:
        heads, tile, (table, to_global) = call.q.shape[1], call.window.tile, call.bias
        self.call, self.steps, like = call, scores.plan.steps, dict(dtype=wide(call.q))
        shape = (heads, len(self.steps), tile, tile)
        self.tiles = None if table is None else call.q.new_zeros(shape, **like)
        self.first = None if to_global is None else call.q.new_zeros(to_global.shape, **like)

    def add(self, dscores: Tensor, batch: Batch) -> None:
        """Add the gradient of a batch's scores (h, W, T)."""
        if self.tiles is None and self.first is None:
            return
        tile, num_global = self.call.window.tile, self.call.num_global
        count = batch.part.stop - batch.part.start
        n = batch.heads.stop - batch.heads.start
        sums = dscores.unflatten(0, (-1, n, count)).sum(0)  # (n, p, W, T)
        if self.first is not None:
            self.first[batch.heads] += sums[..., :num_global].sum((1, 2))
        steps = batch.take(batch.group.steps)
        if self.tiles is not None and steps.shape[1]:
            local = sums[..., num_global:]
            local = local.sum(1, keepdim=True) if len(steps) == 1 else local
            local = local.unflatten(3, (-1, tile)).transpose(2, 3).flatten(1, 2)  # (n, p*J, W, W)
            self.tiles[batch.heads].index_add_(1, steps.flatten(), local)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the table and of the bias to global tokens."""
        (table, to_global), dtable = self.call.bias, None
        if table is not None:
            index = bias_index(self.call.window, self.steps).to(table.device)
            dtable = torch.zeros_like(table, dtype=self.tiles.dtype)
            dtable = dtable.index_add_(1, index.flatten(), self.tiles.flatten(1)).to(table.dtype)
        return dtable, None if to_global is None else self.first.to(to_global.dtype)
