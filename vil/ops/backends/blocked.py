"""A few chunks at a time: the scores of a batch live in the cache, and are never stored.

The forward pass keeps its output and the log-sum-exp of every row; the backward pass computes the
scores again (FlashAttention, arXiv:2205.14135, on chunks). A query chunk is multiplied with the key
chunks that exist for it and with no others, so nothing is computed beyond the border, and masks are
needed only where a chunk is partly padding or the window is exact. Query chunks that see the same
key chunks form a group; groups of the same pattern of offsets (in the inside of the grid all are)
are computed together, as many as fit.

Letters: B images, N heads, X Y grid, L = X*Y tokens, G global tokens, D channels, W = w*w tokens of
a chunk, M chunks of the grid, K offsets; of one block: b images, n heads, h = b*n; of one batch: p
groups of m query chunks and J key chunks each, T = G + J*W keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.chunks import can_be_empty, from_chunks, to_chunks
from vil.ops.bias import LocalBias, tile_bias
from vil.ops.case import Case
from vil.ops.facts import Facts
from vil.ops.window import Window

BATCH_BYTES = 1 << 22  # of scores in flight: a part of a last-level cache


class Pattern(NamedTuple):
    """Groups of the same offsets: queries (P, m) and keys (P, J) are numbers of chunks, and
    seen[i][j] is the number of the offset from query i to key j."""

    queries: Tensor
    keys: Tensor
    seen: tuple[tuple[int, ...], ...]


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
    facts: Facts,
) -> tuple[Tensor, Tensor]:
    """See `vil.ops.recompute`."""
    plan = patterns(facts.window, q.device)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=wide(q))
    for place in places(q, facts, plan):
        block = Block(q, k, v, table, to_global, valid, facts, place)
        rows, stats = torch.empty_like(block.q), lse.new_empty(*block.q.shape[:3], 1)
        for batch in block.batches(plan):
            values = block.gather(block.v, block.v_global, batch)
            scores = block.scores(batch)
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            part = torch.bmm(scores.to(v.dtype), values).div_(total)
            stat = top + total.log()
            if can_be_empty(facts.num_global, valid):
                nothing = top == torch.finfo(top.dtype).min
                part.masked_fill_(nothing, 0.0)
                stat.masked_fill_(nothing, -torch.inf)
            block.put(rows, part, batch)
            block.put(stats, stat, batch)
        out[place], lse[place] = block.tokens(rows), block.tokens(stats)[..., 0]
    return out, lse


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
    facts: Facts,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `vil.ops.recompute`; `out` is of the contract and not needed here."""
    plan = patterns(facts.window, q.device)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    bias = BiasGradient(table, to_global, facts, lse)
    for place in places(q, facts, plan):
        block = Block(q, k, v, table, to_global, valid, facts, place)
        grad = block.chunks(dout[place])
        stat = block.chunks(lse[place][..., None])
        stat = stat.masked_fill(stat == -torch.inf, torch.inf)  # so that empty rows weigh nothing
        dq_rows = torch.empty_like(block.q)
        sums = [lse.new_zeros(x.shape) for x in (block.k, block.v, block.k_global, block.v_global)]
        for batch in block.batches(plan):
            keys = block.gather(block.k, block.k_global, batch)
            values = block.gather(block.v, block.v_global, batch)
            rows, grads = block.pick(block.q, batch), block.pick(grad, batch)
            weights = block.scores(batch, keys).sub_(block.pick(stat, batch)).exp_()
            # not from dout and out, which may be rounded: a row of slopes must add up to nothing
            slopes = torch.bmm(grads, values.mT).to(lse.dtype).mul_(weights)
            slopes.addcmul_(weights, slopes.sum(-1, keepdim=True), value=-1)
            bias.add(slopes, block, batch)
            weights, slopes = weights.to(q.dtype), slopes.to(q.dtype)
            block.put(dq_rows, torch.bmm(slopes, keys).mul_(facts.scale), batch)
            block.scatter(sums[0], sums[2], torch.bmm(slopes.mT, rows), batch)
            block.scatter(sums[1], sums[3], torch.bmm(weights.mT, grads), batch)
        dq[place] = block.tokens(dq_rows)
        for target, chunks, first in zip((dk, dv), sums[:2], sums[2:]):
            target[place] = torch.cat([first.unflatten(0, block.shape), block.tokens(chunks)], 2)
    return dq, dk, dv, *bias.result(table, to_global)


def take(x: Tensor, chunks: Tensor) -> Tensor:
    """x (h, M, ..), chunks (p, c) -> (h, p, c, ..). Whole chunks are copied, which x[:, chunks]
    would do number by number."""
    return x.index_select(1, chunks.flatten()).unflatten(1, chunks.shape)


def wide(x: Tensor) -> torch.dtype:
    """The type of scores and sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def patterns(window: Window, device: torch.device | str = "cpu") -> list[Pattern]:
    """Every query chunk once, with the key chunks that exist for it."""
    groups: dict[tuple, list] = {}
    for query, seen in enumerate(_neighbours(window)):
        keys = tuple(sorted(key for key, _ in seen))
        if len(set(keys)) == len(keys):
            groups.setdefault(keys, []).append((query, sorted(seen)))
        else:  # a key that is met twice has an offset each time: no order in common with others
            groups[query, keys] = [(query, seen)]
    found: dict[tuple, list] = {}
    for members in groups.values():
        offsets = tuple(tuple(offset for _, offset in seen) for _, seen in members)
        queries, keys = [query for query, _ in members], [key for key, _ in members[0][1]]
        found.setdefault(offsets, []).append((queries, keys))
    return [
        Pattern(*(torch.tensor(numbers, device=device) for numbers in zip(*rows)), offsets)
        for offsets, rows in found.items()
    ]


def _neighbours(window: Window) -> Iterator[list[tuple[int, int]]]:
    """For every query chunk, row-major: (key chunk, number of its offset)."""
    rows, cols = window.chunks
    for row in range(rows):
        for col in range(cols):
            seen = []
            for number, (dx, dy) in enumerate(window.offsets):
                r, c = row + dx, col + dy
                if window.cyclic:
                    r, c = r % rows, c % cols
                if 0 <= r < rows and 0 <= c < cols:
                    seen.append((r * cols + c, number))
            yield seen


def places(q: Tensor, facts: Facts, plan: list[Pattern]) -> Iterator[tuple[slice, slice]]:
    """Slices of images and heads: the scores of one group of chunks fit into BATCH_BYTES."""
    images, heads = q.shape[:2]
    fit = max(1, BATCH_BYTES // max(group_bytes(pattern, facts, q) for pattern in plan))
    b = min(images, fit)
    n = min(heads, fit // b)
    for head in range(0, heads, n):
        for image in range(0, images, b):
            yield slice(image, image + b), slice(head, head + n)


def group_bytes(pattern: Pattern, facts: Facts, q: Tensor) -> int:
    """Of the scores of one group, for one image and head."""
    tile = facts.window.tile
    keys = facts.num_global + pattern.keys.shape[1] * tile
    return pattern.queries.shape[1] * tile * keys * wide(q).itemsize


class Block:
    """b images and n heads in the chunk layout, and what is added to their scores."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor | None,
        to_global: Tensor | None,
        valid: Tensor | None,
        facts: Facts,
        place: tuple[slice, slice],
    ) -> None:
        self.facts, self.window, self.wide = facts, facts.window, wide(q)
        self.num_global = facts.num_global
        self.images, self.heads = place
        q, k, v = q[place], k[place], v[place]
        self.shape = q.shape[:2]
        self.q = self.chunks(q * facts.scale)  # (h, M, W, D)
        self.k, self.v = (
            self.chunks(k[:, :, self.num_global :]),
            self.chunks(v[:, :, self.num_global :]),
        )
        self.k_global = k[:, :, : self.num_global].flatten(0, 1)  # (h, G, D)
        self.v_global = v[:, :, : self.num_global].flatten(0, 1)
        self.added: dict[tuple, Tensor] = {}
        self.tile, self.first = self._bias(
            None if table is None else table[self.heads],
            None if to_global is None else to_global[self.heads],
        )
        self.real = self._real(None if valid is None else valid[self.images].to(q.device))

    def chunks(self, x: Tensor) -> Tensor:
        """(b, n, L, ..) -> (h, M, W, ..)."""
        return to_chunks(x, self.window).flatten(2, 3).flatten(0, 1)

    def tokens(self, x: Tensor) -> Tensor:
        """(h, M, W, ..) -> (b, n, L, ..)."""
        x = x.unflatten(0, self.shape).unflatten(2, self.window.chunks)
        return from_chunks(x, self.window)

    def batches(self, plan: list[Pattern]) -> Iterator[Pattern]:
        """As many groups of a pattern at a time as have scores of BATCH_BYTES."""
        for pattern in plan:
            size = len(self.q) * group_bytes(pattern, self.facts, self.q)
            fit = max(1, BATCH_BYTES // size)
            for queries, keys in zip(pattern.queries.split(fit), pattern.keys.split(fit)):
                yield Pattern(queries, keys, pattern.seen)

    def pick(self, x: Tensor, batch: Pattern) -> Tensor:
        """The queries of a batch: (h, M, W, ..) -> (h*p, m*W, ..)."""
        return take(x, batch.queries).flatten(2, 3).flatten(0, 1)

    def put(self, x: Tensor, found: Tensor, batch: Pattern) -> None:
        """Write what was found for the queries of a batch (h*p, m*W, ..) into x (h, M, W, ..)."""
        found = found.unflatten(1, (-1, self.window.tile)).unflatten(0, (len(x), -1)).flatten(1, 2)
        x.index_copy_(1, batch.queries.flatten(), found)

    def gather(self, x: Tensor, first: Tensor, batch: Pattern) -> Tensor:
        """The keys of a batch: (h, M, W, D) and the global tokens (h, G, D) -> (h*p, T, D)."""
        local = take(x, batch.keys).flatten(2, 3)  # (h, p, J*W, D)
        if not self.num_global:
            return local.flatten(0, 1)
        return torch.cat([first[:, None].expand(-1, local.shape[1], -1, -1), local], 2).flatten(
            0, 1
        )

    def scatter(self, x: Tensor, first: Tensor, found: Tensor, batch: Pattern) -> None:
        """The reverse of `gather`, added up: found (h*p, T, D)."""
        found = found.unflatten(0, (len(x), -1)).to(x.dtype)
        first += found[:, :, : self.num_global].sum(1)
        local = found[:, :, self.num_global :].unflatten(2, (-1, self.window.tile))
        x.index_add_(1, batch.keys.flatten(), local.flatten(1, 2))

    def spread(self, scores: Tensor, batch: Pattern) -> Tensor:
        """(h*p, m*W, T) -> (b, n, p, m*W, T), the same memory."""
        return scores.view(*self.shape, len(batch.queries), *scores.shape[1:])

    def scores(self, batch: Pattern, keys: Tensor | None = None) -> Tensor:
        """(h*p, m*W, T) with bias; what is not seen has the smallest finite number."""
        keys = self.gather(self.k, self.k_global, batch) if keys is None else keys
        scores = torch.bmm(self.pick(self.q, batch), keys.mT).to(self.wide)
        if self.tile is not None:
            if batch.seen not in self.added:
                self.added[batch.seen] = self._added(batch.seen)
            self.spread(scores, batch).add_(self.added[batch.seen][:, None])
        if self.real is not None:
            real = self.real[:, batch.keys].flatten(2)  # (b or 1, p, J*W)
            if not real.all():
                hidden = ~F.pad(real, (self.num_global, 0), value=True)[:, None, :, None]
                self.spread(scores, batch).masked_fill_(hidden, torch.finfo(self.wide).min)
        return scores

    def _added(self, seen: tuple[tuple[int, ...], ...]) -> Tensor:
        """(n or 1, m*W, T): bias, and the smallest number beyond the exact window."""
        rows = [torch.cat([self.first, self.tile[:, :, list(row)].flatten(2)], 2) for row in seen]
        return torch.cat(rows, dim=1)

    def _bias(
        self, table: Tensor | None, to_global: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Added to scores: (n or 1, W, K, W) by offset, (n or 1, W, G); None, None for nothing."""
        window, tile = self.window, self.window.tile
        if table is None and to_global is None and window.exact != 1:
            return None, None
        some = dict(dtype=self.wide, device=self.q.device)
        heads = 1 if table is None and to_global is None else self.shape[1]
        local = torch.zeros(1, tile, len(window.offsets) * tile, **some)
        if table is not None:
            local = tile_bias(LocalBias(table.to(self.wide)), window)
        if window.exact == 1:
            local = local.masked_fill(~window.reach(self.q.device), torch.finfo(self.wide).min)
        first = torch.zeros(heads, tile, self.num_global, **some)
        if to_global is not None:
            first += to_global[:, None]
        return local.expand(heads, -1, -1).unflatten(2, (-1, tile)), first

    def _real(self, valid: Tensor | None) -> Tensor | None:
        """bool (b or 1, M, W): the tokens that exist; None where all do."""
        window = self.window
        if valid is None and not any(n % window.size for n in window.grid):
            return None
        limit = torch.tensor([window.grid], device=self.q.device)
        limit = limit if valid is None else torch.minimum(valid, limit)
        lines = []
        for axis, count in enumerate(window.chunks):
            token = torch.arange(count * window.size, device=self.q.device)
            lines.append((token < limit[:, axis, None]).unflatten(1, (count, window.size)))
        rows, cols = lines
        return (rows[:, :, None, :, None] & cols[:, None, :, None, :]).flatten(3).flatten(1, 2)


class BiasGradient:
    """Sums of score gradients by offset and position, (N, W, K, W), and by global token, (N, G)."""

    def __init__(
        self, table: Tensor | None, to_global: Tensor | None, facts: Facts, like: Tensor
    ) -> None:
        heads, window = like.shape[1], facts.window
        shape = (heads, window.tile, len(window.offsets), window.tile)
        self.window, self.num_global = window, facts.num_global
        self.tile = None if table is None else like.new_zeros(shape)
        self.first = None if to_global is None else like.new_zeros(heads, facts.num_global)

    def add(self, slopes: Tensor, block: Block, batch: Pattern) -> None:
        """slopes (h*p, m*W, T): the gradients of a batch's scores."""
        if self.tile is None and self.first is None:
            return
        of_heads = block.spread(slopes, batch).sum((0, 2))  # (n, m*W, T)
        if self.first is not None:
            self.first[block.heads] += of_heads[:, :, : self.num_global].sum(1)
        if self.tile is not None:
            parts = of_heads[:, :, self.num_global :].split(self.window.tile, dim=1)
            for seen, part in zip(batch.seen, parts):
                index = torch.tensor(seen, device=part.device)
                part = part.unflatten(2, (-1, self.window.tile))
                self.tile[block.heads].index_add_(2, index, part)

    def result(
        self, table: Tensor | None, to_global: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the table (N, (4w-1)**2) and of to_global (N, G)."""
        if self.tile is not None:
            index = self.window.bias_index(table.device).flatten()
            spread = torch.zeros_like(table, dtype=self.tile.dtype)
            table = spread.index_add_(1, index, self.tile.flatten(1)).to(table.dtype)
        return table, None if to_global is None else self.first.to(to_global.dtype)
