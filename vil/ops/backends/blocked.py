"""A few chunks at a time: the scores of a batch live in the cache, and are never stored.

The forward pass keeps its output and the log-sum-exp of every row; the backward pass computes the
scores again (FlashAttention, arXiv:2205.14135, on chunks). A query chunk is multiplied with the key
chunks that exist for it and with no others, so nothing is computed beyond the border, and masks are
needed only where a chunk is partly padding or the window is exact. q, k and v stay as they lie:
only the chunks of a batch are copied together. Small calls are the exception: their keys get a
border of empty chunks, so that one batch does what nine would.

Letters: B images, N heads, X Y grid, L = X*Y tokens, G global tokens, D channels, R x C chunks of
W = w*w tokens, K offsets; of one batch (see cuts.py): b images, n heads, p groups of M query chunks
and J key chunks, T = G + J*W keys, h = b*n*p.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_groups import (
    Batch,
    Cut,
    batches,
    bordered,
    chunks_around,
    cuts,
    even,
    even_share,
    keys_at_once,
    keys_of,
    queries_of,
    tiled,
    unbordered,
    untiled,
)
from vil.ops.backends.chunk_layout import can_be_empty
from vil.ops.bias import LocalBias, tile_bias
from vil.ops.call_spec import CallSpec
from vil.ops.window import Window

BATCH_BYTES = 1 << 22  # of scores in flight: a part of a last-level cache
softmax_backward = torch.ops.aten._softmax_backward_data.out  # (dout - sum(dout out)) out


def unsupported(case: Case) -> list[str]:
    """The reasons why it cannot compute a case."""
    reasons = []
    if case.dropout:
        reasons.append(
            "dropout: the backward pass computes the weights again and would not draw alike"
        )
    if case.window.symbolic:
        reasons.append("the size of the grid is open: its chunks are counted beforehand")
    return reasons


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    to_global: Tensor | None,
    valid: Tensor | None,
    facts: CallSpec,
) -> tuple[Tensor, Tensor]:
    """See `vil.ops.custom_op`."""
    scratch = Scratch(q)
    around = chunks_around(facts.window, q.shape[:2].numel())
    scores_of = Scores(q, table, to_global, valid, facts, around, scratch)
    all_keys, all_values = (Keys(x, facts, around, scratch) for x in (k, v))
    out, one = Rows(torch.empty_like(q), facts.window), (*q.shape[:3], 1)
    top, share = (Rows(q.new_empty(one, dtype=wide(q)), facts.window) for _ in range(2))
    for batch in scores_of.batches():
        scores = scores_of.product(batch, scores_of.rows(batch), all_keys.gather(batch))
        top.put(scores.amax(-1), batch)
        weights = torch.softmax(scores, -1, out=scores)
        share.put(weights.amax(-1), batch)
        weights = scratch.cast(weights, q.dtype)
        out.put(torch.bmm(weights, all_values.gather(batch)), batch)
    out, top, share = out.close(), top.close(), share.close()
    lse = top - share.log()  # the largest weight is 1 over the sum of exponentials
    if can_be_empty(facts.num_global, valid):
        nothing = top == torch.finfo(top.dtype).min
        out.masked_fill_(nothing, 0.0)
        lse.masked_fill_(nothing, -torch.inf)
    return out, lse[..., 0]


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    to_global: Tensor | None,
    valid: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    facts: CallSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `vil.ops.custom_op`; `out` is of the contract and not needed here.

    Nor is `lse`, but for the rows that see nothing: its rounding would scale a whole row, and
    one softmax in the cache is faster than a difference and its exponential.
    """
    scratch, other = Scratch(q), Scratch(q)
    around = chunks_around(facts.window, q.shape[:2].numel())
    scores_of = Scores(q, table, to_global, valid, facts, around, scratch)
    all_keys, all_values = Keys(k, facts, around, other), Keys(v, facts, around, scratch)
    if can_be_empty(facts.num_global, valid):
        dout = dout.masked_fill((lse == -torch.inf)[..., None], 0.0)
    grads = tiled(dout, facts.window)
    dq = Rows(torch.empty_like(q), facts.window)
    dk, dv = (KeySums(x, facts, around) for x in (k, v))
    bias = BiasGradient(table, to_global, facts, lse)
    for batch in scores_of.batches():
        keys, rows, grad = all_keys.gather(batch), scores_of.rows(batch), flat(grads, batch)
        weights = scores_of.product(batch, rows, keys)
        weights = torch.softmax(weights, -1, out=weights)
        slopes = other.product(grad, all_values.gather(batch).mT)
        softmax_backward(slopes, weights, -1, slopes.dtype, grad_input=slopes)
        bias.add(slopes, batch)
        weights, slopes = scratch.cast(weights, q.dtype), other.cast(slopes, q.dtype)
        dq.put(torch.bmm(slopes, keys).mul_(facts.scale), batch)
        dk.add(torch.bmm(slopes.mT, rows), batch)
        dv.add(torch.bmm(weights.mT, grad), batch)
    return dq.close(), dk.close(), dv.close(), *bias.result(table, to_global)


def wide(x: Tensor) -> torch.dtype:
    """The type of scores and sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def flat(tiles: Tensor, batch: Batch) -> Tensor:
    """The query chunks of a batch: (B, N, R, C, w, w, D) -> (h, M*W, D)."""
    found = queries_of(tiles, batch)
    return found.reshape(found.shape[:4].numel(), -1, found.shape[-1])


class Scratch:
    """Memory that batches use one after the other: fresh pages would cost as much as a product."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.kept = like, {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised; what was taken for the same use before is gone."""
        size = math.prod(shape)
        if use not in self.kept or len(self.kept[use]) < size:
            self.kept[use] = self.like.new_empty(size, dtype=dtype)
        return self.kept[use][:size].view(shape)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b (h, .., ..), in float32 at least."""
        shape = (*a.shape[:2], b.shape[2])
        found = torch.bmm(a, b, out=self.take("product", shape, a.dtype))
        return self.cast(found, wide(a), "wide")

    def cast(self, x: Tensor, dtype: torch.dtype, use: str = "cast") -> Tensor:
        """x in another type."""
        return x if x.dtype == dtype else self.take(use, x.shape, dtype).copy_(x)


class Rows:
    """A result (B, N, L, D) that is found batch by batch."""

    def __init__(self, result: Tensor, window: Window) -> None:
        self.result, self.window, self.tiles = result, window, tiled(result, window)

    def put(self, found: Tensor, batch: Batch) -> None:
        """Write (h, M*W, D)."""
        place = queries_of(self.tiles, batch)
        place.copy_(found.view(place.shape))

    def close(self) -> Tensor:
        return (
            self.result
            if even(self.window)
            else self.result.copy_(untiled(self.tiles, self.window))
        )


class Keys:
    """Keys or values (B, N, G+L, D), as batches meet them."""

    def __init__(self, x: Tensor, facts: CallSpec, around: int, scratch: Scratch) -> None:
        self.num_global, self.around = facts.num_global, around
        self.scratch = scratch
        self.first = x[:, :, : facts.num_global]
        tiles = tiled(x[:, :, facts.num_global :], facts.window)
        self.tiles = bordered(tiles, facts.window) if around else tiles

    def gather(self, batch: Batch) -> Tensor:
        """(h, T, D), global tokens first."""
        chunks = keys_at_once(self.tiles, batch, self.around)
        lead, (w, _, dim) = chunks[0].shape[:4], chunks[0].shape[-3:]
        keys = self.num_global + len(batch.cut.keys) * w * w
        found = self.scratch.take("keys", (*lead, keys, dim), self.first.dtype)
        if self.num_global:
            found[..., : self.num_global, :] = self.first[batch.images, batch.heads, None, None]
        local = found[..., self.num_global :, :].unflatten(4, (len(chunks), -1))
        for place, chunk in zip(local.unbind(4), chunks):
            place.unflatten(4, chunk.shape[4:-1]).copy_(chunk)
        return found.flatten(0, 3)


class KeySums:
    """The gradient of keys or values like x (B, N, G+L, D), added up batch by batch."""

    def __init__(self, x: Tensor, facts: CallSpec, around: int) -> None:
        self.window, self.num_global = facts.window, facts.num_global
        self.scratch = Scratch(x)
        self.around, some = around, dict(dtype=wide(x))
        self.result = torch.empty_like(x)
        self.local = self.result[:, :, self.num_global :]
        self.first = x.new_zeros(*x.shape[:2], self.num_global, x.shape[3], **some)
        self.direct = even(self.window) and not self.around and wide(x) == x.dtype
        if self.direct:
            self.tiles = tiled(self.local.zero_(), self.window)
        else:
            (rows, cols), w = self.window.chunks, self.window.size
            down, across = rows + 2 * self.around, cols + 2 * self.around
            tiles = x.new_zeros(*x.shape[:2], down, w, across, w, x.shape[3], **some)
            self.tiles = tiles.transpose(3, 4)

    def add(self, found: Tensor, batch: Batch) -> None:
        """found (h, T, D): what the batch's groups give to the keys that they meet."""
        places = keys_of(self.tiles, batch, self.around)
        found = self.scratch.cast(found, self.first.dtype).unflatten(0, places[0].shape[:4])
        if self.num_global:
            self.first[batch.images, batch.heads] += found[..., : self.num_global, :].sum((2, 3))
        local = found[..., self.num_global :, :].unflatten(4, (-1, *places[0].shape[4:6]))
        for place, part in zip(places, local.unbind(4)):
            place.add_(part)

    def close(self) -> Tensor:
        self.result[:, :, : self.num_global] = self.first
        if not self.direct:
            tiles = unbordered(self.tiles, self.window) if self.around else self.tiles
            self.local.copy_(untiled(tiles, self.window))
        return self.result


class Scores:
    """The products of queries and keys, what is added to them, and what hides them."""

    def __init__(
        self,
        q: Tensor,
        table: Tensor | None,
        to_global: Tensor | None,
        valid: Tensor | None,
        facts: CallSpec,
        around: int,
        scratch: Scratch,
    ) -> None:
        self.q, self.wide, self.shape = tiled(q, facts.window), wide(q), q.shape
        self.around, self.scratch = around, scratch
        self.table, self.to_global, self.facts = table, to_global, facts
        self.real = self._real(None if valid is None else valid.to(q.device))
        self.added: Tensor | None = None
        self.first_head = 0

    def batches(self) -> Iterator[Batch]:
        """All of them; what is added to their scores is prepared for as many heads as fit."""
        images, heads = self.shape[:2]
        tile = self.facts.window.tile
        share = even_share(heads, BATCH_BYTES // (9 * tile**2 * self.wide.itemsize))
        for self.first_head in range(0, heads, share):
            some = slice(self.first_head, min(self.first_head + share, heads))
            bias = self._bias(some)
            for cut in cuts(self.facts.window, self.around):
                self.added = None if bias is None else self._added(*bias, cut)
                keys = self.facts.num_global + len(cut.keys) * tile
                size = cut.queries * tile * keys * self.wide.itemsize
                yield from batches(cut, images, some, BATCH_BYTES // size)

    def rows(self, batch: Batch) -> Tensor:
        """The queries of a batch (h, M*W, D), scaled."""
        found = queries_of(self.q, batch)
        rows = self.scratch.take("rows", found.shape, found.dtype)
        torch.mul(found, self.facts.scale, out=rows)
        return rows.view(found.shape[:4].numel(), -1, found.shape[-1])

    def product(self, batch: Batch, rows: Tensor, keys: Tensor) -> Tensor:
        """(h, M*W, T) with bias; what is not seen has the smallest finite number."""
        scores = self.scratch.product(rows, keys.mT)
        spread = spread_out(scores, batch)
        if self.added is not None:
            one = len(self.added) == 1
            heads = slice(batch.heads.start - self.first_head, batch.heads.stop - self.first_head)
            spread.add_(self.added[slice(None) if one else heads, None])
        if self.real is not None:
            real = torch.stack([x[:, :1] for x in keys_of(self.real, batch, self.around)], 4)
            if not real.all():
                real = real.flatten(4).flatten(2, 3)  # (b, 1, p, J*W)
                hidden = ~F.pad(real, (self.facts.num_global, 0), value=True)[:, :, :, None]
                spread.masked_fill_(hidden, torch.finfo(self.wide).min)
        return scores

    def _added(self, tile: Tensor, first: Tensor, cut: Cut) -> Tensor:
        """(n or 1, M*W, T): bias, and the smallest number beyond the exact window."""
        size = first.shape[2] + len(cut.keys) * tile.shape[1]
        shape = (len(cut.seen), len(tile), tile.shape[1], size)
        added = self.scratch.take("added", shape, tile.dtype)
        for rows, row in zip(added, cut.seen):
            torch.cat([first, *(tile[:, :, number] for number in row)], 2, out=rows)
        return added.transpose(0, 1).flatten(1, 2)

    def _bias(self, heads: slice) -> tuple[Tensor, Tensor] | None:
        """Added to scores: (n or 1, W, K, W) by offset, (n or 1, W, G); None for nothing."""
        window, tile = self.facts.window, self.facts.window.tile
        if self.table is None and self.to_global is None and window.exact != 1:
            return None
        some = dict(dtype=self.wide, device=self.q.device)
        count = 1 if self.table is None and self.to_global is None else heads.stop - heads.start
        local = torch.zeros(1, tile, len(window.offsets) * tile, **some)
        if self.table is not None:
            local = tile_bias(LocalBias(self.table[heads].to(self.wide)), window)
        if window.exact == 1:
            local = local.masked_fill(~window.reach(self.q.device), torch.finfo(self.wide).min)
        first = torch.zeros(count, tile, self.facts.num_global, **some)
        if self.to_global is not None:
            first += self.to_global[heads, None]
        return local.expand(count, -1, -1).unflatten(2, (-1, tile)), first

    def _real(self, valid: Tensor | None) -> Tensor | None:
        """bool, as `Keys.tiles` with D 1: the tokens that exist; None where all do."""
        window, (images, heads) = self.facts.window, self.shape[:2]
        if valid is None and even(window) and (window.cyclic or not self.around):
            return None
        limit = torch.tensor([window.grid], device=self.q.device)
        limit = limit if valid is None else torch.minimum(valid, limit)
        lines = []
        for axis, count in enumerate(window.chunks):
            token = torch.arange(count * window.size, device=self.q.device)
            lines.append((token < limit[:, axis, None]).unflatten(1, (count, window.size)))
        rows, cols = lines
        real = rows[:, None, :, None, :, None, None] & cols[:, None, None, :, None, :, None]
        real = bordered(real, window) if self.around else real
        return real.expand(images, heads, -1, -1, -1, -1, -1)


def spread_out(scores: Tensor, batch: Batch) -> Tensor:
    """(h, M*W, T) -> (b, n, p, M*W, T), the same memory."""
    heads = batch.heads.stop - batch.heads.start
    return scores.unflatten(0, (-1, heads, batch.cut.groups))


class BiasGradient:
    """Sums of score gradients by offset and position, (N, W, K, W), and by global token, (N, G)."""

    def __init__(
        self, table: Tensor | None, to_global: Tensor | None, facts: CallSpec, like: Tensor
    ) -> None:
        heads, window = like.shape[1], facts.window
        shape = (heads, window.tile, len(window.offsets), window.tile)
        self.window, self.num_global = window, facts.num_global
        self.tile = None if table is None else like.new_zeros(shape)
        self.first = None if to_global is None else like.new_zeros(heads, facts.num_global)
        self.like, self.seen = like, None

    def add(self, slopes: Tensor, batch: Batch) -> None:
        """slopes (h, M*W, T): the gradients of a batch's scores."""
        if self.tile is None and self.first is None:
            return
        if batch.cut.seen is not self.seen:  # the batches of a cut follow each other
            self._flush()
            self.seen = batch.cut.seen
            self.sums = self.like.new_zeros(self.like.shape[1], *slopes.shape[1:])
        of_images = spread_out(slopes, batch).sum(2)  # both sums at once would take 10 x as long
        self.sums[batch.heads] += of_images.sum(0) if len(of_images) > 1 else of_images[0]

    def _flush(self) -> None:
        """Put the sums of a cut (N, M*W, T) where they belong."""
        if self.seen is None:
            return
        if self.first is not None:
            self.first += self.sums[:, :, : self.num_global].sum(1)
        if self.tile is not None:
            parts = self.sums[:, :, self.num_global :].split(self.window.tile, dim=1)
            for seen, part in zip(self.seen, parts):
                index = torch.tensor(seen, device=part.device)
                self.tile.index_add_(2, index, part.unflatten(2, (-1, self.window.tile)))

    def result(
        self, table: Tensor | None, to_global: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the table (N, (4w-1)**2) and of to_global (N, G)."""
        self._flush()
        if self.tile is not None:
            index = self.window.bias_index(table.device).flatten()
            spread = torch.zeros_like(table, dtype=self.tile.dtype)
            table = spread.index_add_(1, index, self.tile.flatten(1)).to(table.dtype)
        return table, None if to_global is None else self.first.to(to_global.dtype)
