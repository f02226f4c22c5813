"""A few chunks at a time: the scores of a block live in the cache, and are never stored.

The forward pass keeps its output and the log-sum-exp of every row; the backward pass computes the
scores again (FlashAttention, arXiv:2205.14135, on chunks). A query chunk is multiplied with the key
chunks that exist for it and with no others, so nothing is computed beyond the border, and masks are
needed only where a chunk is partly padding or the window is exact. Query chunks that see the same
key chunks are taken together.

Letters: B images, N heads, X Y grid, L = X*Y tokens, G global tokens, D channels, W = w*w tokens of
a chunk, M chunks of the grid, K offsets; of one block: b images, n heads, h = b*n; of one group: m
query chunks, J key chunks, T = G + J*W keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.chunks import can_be_empty, from_chunks, to_chunks
from vil.ops.bias import LocalBias, tile_bias
from vil.ops.facts import Facts
from vil.ops.window import Window

BLOCK_BYTES = 1 << 22  # of scores in flight: a part of a last-level cache


class Group(NamedTuple):
    """Query chunks that see the same key chunks; seen[i][j]: the offset from query i to key j."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    seen: tuple[tuple[int, ...], ...]


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
    plan = groups(facts.window)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=wide(q))
    for place in places(q, facts, plan):
        block = Block(q, k, v, table, to_global, valid, facts, place)
        rows, stats = torch.empty_like(block.q), lse.new_empty(*block.q.shape[:3], 1)
        for group in plan:
            values = block.gather(block.v, block.v_global, group)
            scores = block.scores(group)
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            part = torch.bmm(scores.to(v.dtype), values).div_(total)
            stat = top + total.log()
            if can_be_empty(facts.num_global, valid):
                nothing = top == torch.finfo(top.dtype).min
                part.masked_fill_(nothing, 0.0)
                stat.masked_fill_(nothing, -torch.inf)
            for query, own, its in zip(group.queries, *block.split(part, stat)):
                rows[:, query], stats[:, query] = own, its
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
    """See `vil.ops.recompute`."""
    plan, G = groups(facts.window), facts.num_global
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    bias = BiasGradient(table, to_global, facts, lse)
    for place in places(q, facts, plan):
        block = Block(q, k, v, table, to_global, valid, facts, place)
        grad = block.chunks(dout[place])
        delta = block.chunks((dout[place].to(lse.dtype) * out[place]).sum(-1, keepdim=True))
        stat = block.chunks(lse[place][..., None])
        stat = stat.masked_fill(stat == -torch.inf, torch.inf)  # so that empty rows weigh nothing
        dq_rows = torch.empty_like(block.q)
        sums = [lse.new_zeros(x.shape) for x in (block.k, block.v, block.k_global, block.v_global)]
        for group in plan:
            keys = block.gather(block.k, block.k_global, group)
            values = block.gather(block.v, block.v_global, group)
            rows, grads = block.pick(block.q, group), block.pick(grad, group)
            weights = block.scores(group, keys).sub_(block.pick(stat, group)).exp_()
            slopes = torch.bmm(grads, values.mT).to(lse.dtype).sub_(block.pick(delta, group))
            slopes.mul_(weights)
            bias.add(slopes, block, group)
            weights, slopes = weights.to(q.dtype), slopes.to(q.dtype)
            (parts,) = block.split(torch.bmm(slopes, keys).mul_(facts.scale))
            for query, part in zip(group.queries, parts):
                dq_rows[:, query] = part
            pairs = torch.bmm(slopes.mT, rows), torch.bmm(weights.mT, grads)
            for chunks, first, found in zip(sums[:2], sums[2:], pairs):
                first += found[:, :G]
                for key, part in zip(group.keys, found[:, G:].split(facts.window.tile, dim=1)):
                    chunks[:, key] += part
        dq[place] = block.tokens(dq_rows)
        for target, chunks, first in zip((dk, dv), sums[:2], sums[2:]):
            target[place] = torch.cat([first.unflatten(0, block.shape), block.tokens(chunks)], 2)
    return dq, dk, dv, *bias.result(table, to_global)


def wide(x: Tensor) -> torch.dtype:
    """The type of scores and sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def groups(window: Window) -> list[Group]:
    """Every query chunk once, with the key chunks that exist for it."""
    found: dict[tuple, list] = {}
    for query, seen in enumerate(_neighbours(window)):
        keys = tuple(sorted(key for key, _ in seen))
        if len(set(keys)) == len(keys):
            found.setdefault(keys, []).append((query, sorted(seen)))
        else:  # a key that is met twice has an offset each time: no order in common with others
            found[query, keys] = [(query, seen)]
    return [
        Group(
            tuple(query for query, _ in members),
            tuple(key for key, _ in members[0][1]),
            tuple(tuple(offset for _, offset in seen) for _, seen in members),
        )
        for members in found.values()
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


def places(q: Tensor, facts: Facts, plan: list[Group]) -> Iterator[tuple[slice, slice]]:
    """Slices of images and heads whose scores, of one group, are no more than BLOCK_BYTES."""
    images, heads = q.shape[:2]
    tile = facts.window.tile
    scores = max(len(g.queries) * tile * (facts.num_global + len(g.keys) * tile) for g in plan)
    fit = max(1, BLOCK_BYTES // (scores * wide(q).itemsize))
    b = min(images, fit)
    n = min(heads, fit // b)
    for head in range(0, heads, n):
        for image in range(0, images, b):
            yield slice(image, image + b), slice(head, head + n)


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
        self.window, self.num_global, self.wide = facts.window, facts.num_global, wide(q)
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

    def pick(self, x: Tensor, group: Group) -> Tensor:
        """A group's queries: (h, M, W, ..) -> (h, m*W, ..)."""
        if len(group.queries) == 1:
            return x[:, group.queries[0]]
        return torch.cat([x[:, query] for query in group.queries], dim=1)

    def split(self, *found: Tensor) -> list[tuple[Tensor, ...]]:
        """The inverse: of each (h, m*W, ..) its chunks (h, W, ..)."""
        return [x.split(self.window.tile, dim=1) for x in found]

    def gather(self, x: Tensor, first: Tensor, group: Group) -> Tensor:
        """The global tokens and a group's key chunks: (h, T, D)."""
        return torch.cat([first, *(x[:, key] for key in group.keys)], dim=1)

    def scores(self, group: Group, keys: Tensor | None = None) -> Tensor:
        """(h, m*W, T) with bias; what is not seen has the smallest finite number."""
        keys = self.gather(self.k, self.k_global, group) if keys is None else keys
        scores = torch.bmm(self.pick(self.q, group), keys.mT).to(self.wide)
        if self.tile is not None:
            if group.seen not in self.added:
                self.added[group.seen] = self._added(group)
            scores.view(*self.shape, *scores.shape[1:]).add_(self.added[group.seen])
        if self.real is not None:
            real = self.real[:, list(group.keys)].flatten(1)
            if not real.all():
                hidden = ~F.pad(real, (self.num_global, 0), value=True)[:, None]  # (b or 1, 1, T)
                spread = scores.view(self.shape[0], -1, scores.shape[2])
                spread.masked_fill_(hidden, torch.finfo(self.wide).min)
        return scores

    def _added(self, group: Group) -> Tensor:
        """(n or 1, m*W, T): bias, and the smallest number beyond the exact window."""
        rows = [
            torch.cat([self.first, self.tile[:, :, list(seen)].flatten(2)], 2)
            for seen in group.seen
        ]
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

    def add(self, slopes: Tensor, block: Block, group: Group) -> None:
        """slopes (h, m*W, T): the gradients of a group's scores."""
        if self.tile is None and self.first is None:
            return
        of_heads = slopes.view(*block.shape, *slopes.shape[1:]).sum(0)  # (n, m*W, T)
        if self.first is not None:
            self.first[block.heads] += of_heads[:, :, : self.num_global].sum(1)
        if self.tile is not None:
            (parts,) = block.split(of_heads[:, :, self.num_global :])
            for seen, part in zip(group.seen, parts):
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
