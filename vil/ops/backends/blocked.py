"""Local attention in batches of a few chunks, whose scores are never stored for all chunks.

The backward pass recomputes the scores of each batch, as in FlashAttention (arXiv:2205.14135). q, k
and v keep their memory layout, and only the chunks of one batch are copied.

Query chunks at an edge of the grid have fewer neighbors than others, so the interior, each edge and
each corner need their own batches. For small inputs, a halo of extra chunks around the grid makes
all chunks alike. Cyclic windows always have a halo, which contains copies of the chunks at the
opposite edge.

Shapes: B batch, N heads, X Y grid, L = X*Y tokens, G global tokens, D channels, R x C chunks of W =
w*w tokens, K offsets.
A batch has b images and n heads. For each image and head, it has p blocks, so h = b*n*p blocks in
total. A block is M query chunks and the J key chunks that all of them attend to, so it has T = G +
J*W keys.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import block_sparse
from vil.ops.backends.chunk_groups import (
    Batch,
    ChunkGroup,
    add_halo,
    batches,
    chunk_groups,
    halo_size,
    key_rectangles,
    key_tiles,
    query_tiles,
    sum_halo,
)
from vil.ops.backends.chunk_layout import can_be_empty, from_tiles, is_even, to_tiles
from vil.ops.backends.scratch import BATCH_BYTES, Scratch, even_share, wide
from vil.ops.bias import LocalBias, tile_bias
from vil.ops.call import Call, Gradients
from vil.ops.layout import Layout
from vil.ops.window import Mask, Window, real_cells
from vil.utils.transforms import is_exporting


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


def forward(call: Call, *, sizes_only: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores.

    The log-sum-exp is None if the call does not need it. sizes_only: compute only one batch of each
    size, to measure the peak memory quickly.
    """
    if isinstance(call.window, Layout):
        return block_sparse.forward(call)
    q, window = call.q, call.window
    scratch = Scratch(q)
    halo = halo_size(window, q.shape[:2].numel())
    scores_of = Scores(call, halo, scratch)
    all_keys, all_values = (Keys(x, call, halo, scratch) for x in (call.k, call.v))
    out, stat_shape = OutputTiles(torch.empty_like(q), window), (*q.shape[:3], 1)
    top, largest = (OutputTiles(q.new_empty(stat_shape, dtype=wide(q)), window) for _ in range(2))
    has_empty = can_be_empty(call.num_global, call.valid_hw)
    all_batches = scores_of.batches()
    for batch in one_of_each_size(all_batches) if sizes_only else all_batches:
        scores = scores_of.compute(batch, scores_of.queries(batch), all_keys.gather(batch))
        if has_empty or call.needs_lse:
            top.put(scores.amax(-1), batch)
        weights = torch.softmax(scores, -1, out=scores)
        if call.needs_lse:
            largest.put(weights.amax(-1), batch)
        weights = scratch.cast(weights, q.dtype)
        out.put(torch.bmm(weights, all_values.gather(batch)), batch)
    out, top, largest = out.close(), top.close(), largest.close()
    if has_empty:
        empty = top == torch.finfo(top.dtype).min
        out.masked_fill_(empty, 0.0)
    if not call.needs_lse:
        return out, None
    lse = top - largest.log()  # the largest weight is 1 over the sum of exponentials
    if has_empty:
        lse.masked_fill_(empty, -torch.inf)
    return out, lse[..., 0]


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases. dout: the gradient of the output.

    `lse` (log-sum-exp of the scores) is used only to find queries without keys. `out` is not used.
    """
    if isinstance(call.window, Layout):
        return block_sparse.backward(call, out, lse, dout)
    q, window = call.q, call.window
    scratch, other = Scratch(q), Scratch(q)
    halo = halo_size(window, q.shape[:2].numel())
    scores_of = Scores(call, halo, scratch)
    all_keys, all_values = Keys(call.k, call, halo, other), Keys(call.v, call, halo, scratch)
    if can_be_empty(call.num_global, call.valid_hw):
        dout = dout.masked_fill((lse == -torch.inf)[..., None], 0.0)
    grads = to_tiles(dout, window)
    dq = OutputTiles(torch.empty_like(q), window)
    dk, dv = (KVGrad(x, call, halo) for x in (call.k, call.v))
    bias = BiasGrad(call, lse)
    for batch in scores_of.batches():
        keys, queries = all_keys.gather(batch), scores_of.queries(batch)
        grad = flatten_queries(grads, batch)
        weights = scores_of.compute(batch, queries, keys)
        # not exp(scores - lse), which would scale all weights by the rounding error of lse
        weights = torch.softmax(weights, -1, out=weights)
        dscores = other.matmul(grad, all_values.gather(batch).mT)
        block_sparse.softmax_backward(dscores, weights, -1, dscores.dtype, grad_input=dscores)
        bias.add(dscores, batch)
        weights, dscores = scratch.cast(weights, q.dtype), other.cast(dscores, q.dtype)
        dq.put(torch.bmm(dscores, keys).mul_(call.scale), batch)
        dk.add(torch.bmm(dscores.mT, queries), batch)
        dv.add(torch.bmm(weights.mT, grad), batch)
    return dq.close(), dk.close(), dv.close(), *bias.result()


def one_of_each_size(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield only the first batch of each size (the numbers of queries, keys, images and heads)."""
    seen = set()
    for batch in batches:
        group = batch.group
        slices = (batch.images, batch.heads)
        size = (group.count, group.side, len(group.keys), *(x.stop - x.start for x in slices))
        if size not in seen:
            seen.add(size)
            yield batch


def flatten_queries(tiles: Tensor, batch: Batch) -> Tensor:
    """Return the queries of a batch, (h, M*W, D): h blocks of M query chunks of W tokens.

    tiles (B, N, R, C, w, w, D): all queries, in the layout of `to_tiles`.
    """
    x = query_tiles(tiles, batch)
    return x.reshape(x.shape[:4].numel(), -1, x.shape[-1])


class OutputTiles:
    """Collects the results of the batches in an output tensor (B, N, L, D)."""

    def __init__(self, result: Tensor, window: Window) -> None:
        self.result, self.window, self.tiles = result, window, to_tiles(result, window)

    def put(self, x: Tensor, batch: Batch) -> None:
        """Write the results x (h, M*W, D) of a batch: h blocks of M query chunks of W tokens."""
        tiles = query_tiles(self.tiles, batch)
        tiles.copy_(x.view(tiles.shape))

    def close(self) -> Tensor:
        """Return the complete output (B, N, L, D). Call this after the last batch of chunks."""
        if is_even(self.window):  # the tiles are a view of the result
            return self.result
        return self.result.copy_(from_tiles(self.tiles, self.window))


class Keys:
    """The keys or values (B, N, G+L, D) of a call. `gather` copies those of a batch of chunks."""

    def __init__(self, x: Tensor, call: Call, halo: int, scratch: Scratch) -> None:
        self.num_global, self.halo, self.scratch = call.num_global, halo, scratch
        self.first = x[:, :, : call.num_global]
        tiles = to_tiles(x[:, :, call.num_global :], call.window)
        self.tiles = add_halo(tiles, call.window) if halo else tiles

    def gather(self, batch: Batch) -> Tensor:
        """Copy the keys of a batch to (h, T, D), global tokens first.

        A batch has h blocks. The query chunks of a block share T keys.
        """
        chunks = key_rectangles(self.tiles, batch, self.halo)
        lead, (w, _, dim) = chunks[0].shape[:4], chunks[0].shape[-3:]
        num_keys = self.num_global + len(batch.group.keys) * w * w
        keys = self.scratch.take("keys", (*lead, num_keys, dim), self.first.dtype)
        if self.num_global:
            keys[..., : self.num_global, :] = self.first[batch.images, batch.heads, None, None]
        local = keys[..., self.num_global :, :].unflatten(4, (len(chunks), -1))
        for target, chunk in zip(local.unbind(4), chunks):
            target.unflatten(4, chunk.shape[4:-1]).copy_(chunk)
        return keys.flatten(0, 3)


class KVGrad:
    """Sums the gradient of the keys or values (B, N, G+L, D) over batches of query chunks."""

    def __init__(self, x: Tensor, call: Call, halo: int) -> None:
        self.window, self.num_global = call.window, call.num_global
        self.scratch = Scratch(x)
        self.halo, like = halo, dict(dtype=wide(x))
        self.result = torch.empty_like(x)
        self.local = self.result[:, :, self.num_global :]
        self.first = x.new_zeros(*x.shape[:2], self.num_global, x.shape[3], **like)
        self.in_place = is_even(self.window) and not halo and wide(x) == x.dtype
        if self.in_place:
            self.tiles = to_tiles(self.local.zero_(), self.window)
        else:
            (rows, cols), w = self.window.chunks, self.window.size
            down, across = rows + 2 * halo, cols + 2 * halo
            tiles = x.new_zeros(*x.shape[:2], down, w, across, w, x.shape[3], **like)
            self.tiles = tiles.transpose(3, 4)

    def add(self, grad: Tensor, batch: Batch) -> None:
        """Add the gradient of the keys (or values) of a batch.

        grad (h, T, D): the gradient for h blocks. The query chunks of a block share T keys.
        """
        tiles = key_tiles(self.tiles, batch, self.halo)
        grad = self.scratch.cast(grad, self.first.dtype).unflatten(0, tiles[0].shape[:4])
        if self.num_global:
            self.first[batch.images, batch.heads] += grad[..., : self.num_global, :].sum((2, 3))
        local = grad[..., self.num_global :, :].unflatten(4, (-1, *tiles[0].shape[4:6]))
        for tile, part in zip(tiles, local.unbind(4)):
            tile.add_(part)

    def close(self) -> Tensor:
        """Return the complete gradient (B, N, G+L, D). Call this after the last batch of chunks."""
        self.result[:, :, : self.num_global] = self.first
        if not self.in_place:
            tiles = sum_halo(self.tiles, self.window) if self.halo else self.tiles
            self.local.copy_(from_tiles(tiles, self.window))
        return self.result


class Scores:
    """Computes attention scores (q k^T, plus bias and mask) for one batch of a call at a time."""

    def __init__(self, call: Call, halo: int, scratch: Scratch) -> None:
        self.call, self.window, self.halo, self.scratch = call, call.window, halo, scratch
        self.q, self.dtype = to_tiles(call.q, call.window), wide(call.q)
        self.real = self._real()
        self.added: Tensor | None = None
        self.first_head = 0

    def batches(self) -> Iterator[Batch]:
        """Yield batches that together cover all query chunks of all images and heads.

        A batch has so few heads that their bias fits into the cache.
        """
        (images, heads), tile = self.call.q.shape[:2], self.window.tile
        share = even_share(heads, BATCH_BYTES // (9 * tile**2 * self.dtype.itemsize))
        for self.first_head in range(0, heads, share):
            some = slice(self.first_head, min(self.first_head + share, heads))
            bias = self._bias(some)
            for group in chunk_groups(self.window, self.halo):
                self.added = None if bias is None else self._added(*bias, group)
                keys = self.call.num_global + len(group.keys) * tile
                size = group.num_queries * tile * keys * self.dtype.itemsize
                yield from batches(group, images, some, BATCH_BYTES // size)

    def queries(self, batch: Batch) -> Tensor:
        """Return the scaled queries of a batch, (h, M*W, D): h blocks of M query chunks of W
        tokens."""
        tiles = query_tiles(self.q, batch)
        queries = self.scratch.take("queries", tiles.shape, tiles.dtype)
        torch.mul(tiles, self.call.scale, out=queries)
        return queries.view(tiles.shape[:4].numel(), -1, tiles.shape[-1])

    def compute(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the scores (h, M*W, T) of a batch of h blocks, including the bias.

        queries (h, M*W, D), keys (h, T, D): M query chunks of W tokens and T keys per block. Masked
        scores are set to the most negative finite number.
        """
        scores = self.scratch.matmul(queries, keys.mT)
        by_head = split_lanes(scores, batch)
        if self.added is not None:
            shared = len(self.added) == 1
            heads = slice(batch.heads.start - self.first_head, batch.heads.stop - self.first_head)
            by_head.add_(self.added[slice(None) if shared else heads, None])
        if self.real is not None:
            real = torch.stack([x[:, :1] for x in key_tiles(self.real, batch, self.halo)], 4)
            if not real.all():
                real = real.flatten(4).flatten(2, 3)  # (b, 1, p, J*W)
                hidden = ~F.pad(real, (self.call.num_global, 0), value=True)[:, :, :, None]
                by_head.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return scores

    def _added(self, tile: Tensor, first: Tensor, group: ChunkGroup) -> Tensor:
        """Return the tensor to add to the scores of each block of a chunk group.

        It has the bias, and the most negative finite number for keys outside of an exact window.
        Its shape is (n, M*W, T) for n heads; n is 1 without a bias. A block has M query chunks of W
        tokens, which share T keys. tile, first: the results of `_bias`.
        """
        size = first.shape[2] + len(group.keys) * tile.shape[1]
        shape = (group.num_queries, len(tile), tile.shape[1], size)
        added = self.scratch.take("added", shape, tile.dtype)
        for out, indices in zip(added, group.offset_index):
            torch.cat([first, *(tile[:, :, index] for index in indices)], 2, out=out)
        return added.transpose(0, 1).flatten(1, 2)

    def _bias(self, heads: slice) -> tuple[Tensor, Tensor] | None:
        """Return (local, first): the bias of n heads toward local keys and toward global keys.

        local (n or 1, W, K, W): for the W queries of a chunk and the W keys in each of K chunks. It
        is the most negative finite number for keys outside of an exact window.
        first (n or 1, W, G): for the same queries and the global keys.
        Returns None if there is neither a bias nor an exact window.
        """
        window, tile, (table, to_global) = self.window, self.window.tile, self.call.bias
        has_bias = table is not None or to_global is not None
        if not has_bias and window.mask != Mask.EXACT:
            return None
        like = dict(dtype=self.dtype, device=self.q.device)
        count = heads.stop - heads.start if has_bias else 1
        local = torch.zeros(1, tile, len(window.offsets) * tile, **like)
        if table is not None:
            local = tile_bias(LocalBias(table[heads].to(self.dtype)), window)
        if window.mask == Mask.EXACT:
            local = local.masked_fill(~window.reach(self.q.device), torch.finfo(self.dtype).min)
        first = torch.zeros(count, tile, self.call.num_global, **like)
        if to_global is not None:
            first += to_global[heads, None]
        return local.expand(count, -1, -1).unflatten(2, (-1, tile)), first

    def _real(self) -> Tensor | None:
        """Return which keys are not padding, (B, N, R, C, w, w, 1) bool; None if no key is padding.

        R and C include the halo, the chunks added around the grid.
        """
        window, valid_hw = self.window, self.call.valid_hw
        if valid_hw is None and is_even(window) and (window.cyclic or not self.halo):
            return None
        limit = torch.tensor([window.grid]) if valid_hw is None else valid_hw
        real = real_cells(limit.to(self.q.device), window.grid).flatten(2)[..., None]
        real = to_tiles(real, window)
        real = add_halo(real, window) if self.halo else real
        return real.expand(*self.call.q.shape[:2], -1, -1, -1, -1, -1)


def split_lanes(scores: Tensor, batch: Batch) -> Tensor:
    """View the scores (h, M*W, T) of a batch as (images, heads, blocks, M*W, T).

    h is the product of images, heads and blocks. A block is M query chunks of W tokens that share T
    keys.
    """
    heads = batch.heads.stop - batch.heads.start
    return scores.unflatten(0, (-1, heads, batch.group.num_blocks))


class BiasGrad:
    """The gradient of the bias, summed over images and query chunks.

    tile (N, W, K, W): for the W queries of a chunk and the W keys at each of K chunk offsets; None
    without a bias table.
    first (N, G): for the global keys; None without a bias toward them.
    """

    def __init__(self, call: Call, lse: Tensor) -> None:
        heads, window, (table, to_global) = lse.shape[1], call.window, call.bias
        shape = (heads, window.tile, len(window.offsets), window.tile)
        self.call, self.window, self.num_global = call, window, call.num_global
        self.tile = None if table is None else lse.new_zeros(shape)
        self.first = None if to_global is None else lse.new_zeros(heads, call.num_global)
        self.like, self.offset_index = lse, None

    def add(self, dscores: Tensor, batch: Batch) -> None:
        """Sum the gradient of a batch's scores over images and blocks, and add it to the result.

        dscores (h, M*W, T): the gradient of the scores of h blocks. A block has M query chunks of W
        tokens, which share T keys.
        """
        if self.tile is None and self.first is None:
            return
        if batch.group.offset_index is not self.offset_index:  # a group's batches are consecutive
            self._flush()
            self.offset_index = batch.group.offset_index
            self.sums = self.like.new_zeros(self.like.shape[1], *dscores.shape[1:])
        of_images = split_lanes(dscores, batch).sum(2)  # one sum over both axes takes 10x as long
        self.sums[batch.heads] += of_images.sum(0) if len(of_images) > 1 else of_images[0]

    def _flush(self) -> None:
        """Add the sums of the current chunk group, `self.sums`, to `self.tile` and `self.first`.

        `self.sums` (N, M*W, T) is the gradient summed over the images and over the blocks of the
        group. A block has M query chunks of W tokens, which share T keys.
        """
        if self.offset_index is None:
            return
        if self.first is not None:
            self.first += self.sums[:, :, : self.num_global].sum(1)
        if self.tile is not None:
            parts = self.sums[:, :, self.num_global :].split(self.window.tile, dim=1)
            for indices, part in zip(self.offset_index, parts):
                index = torch.tensor(indices, device=part.device)
                self.tile.index_add_(2, index, part.unflatten(2, (-1, self.window.tile)))

    def result(self) -> LocalBias:
        """Return the gradients of the bias table and of the bias toward global tokens.

        They are (N, (4w-1)**2) and (N, G); None for a bias that the call does not have.
        """
        self._flush()
        table, to_global = self.call.bias
        if table is not None:
            index = self.window.bias_index(table.device).flatten()
            dtable = torch.zeros_like(table, dtype=self.tile.dtype)
            table = dtable.index_add_(1, index, self.tile.flatten(1)).to(table.dtype)
        return LocalBias(table, None if to_global is None else self.first.to(to_global.dtype))
