"""What a block does to each token alone, in parts of the tokens that fit into a cache.

Shapes: T tokens, C channels, F output features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from vil.layers.block import Block

PART_BYTES = 1 << 24  # of the activations of an MLP for a part of the tokens


def part_size(channels: int, dtype: torch.dtype) -> int:
    """Return the number of tokens in a part. An MLP holds about 9C numbers for a token."""
    return max(1, PART_BYTES // (9 * channels * dtype.itemsize))


_sizes_only = ContextVar("sizes_only", default=False)


@contextmanager
def sizes_only() -> Iterator[None]:
    """Let `parts` yield only the first and the last part in the block, to count memory."""
    token = _sizes_only.set(True)
    try:
        yield
    finally:
        _sizes_only.reset(token)


def parts(count: int, size: int) -> Iterator[slice]:
    """Divide `count` tokens into parts of at most `size`."""
    starts = range(0, count, size)
    if _sizes_only.get():
        starts = sorted({*starts[:1], *starts[-1:]})
    return (slice(first, min(first + size, count)) for first in starts)


def map_parts(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """Apply a function of each token, from (T, C) to (T, F), to parts of at most `size` tokens."""
    out = None
    for part in parts(len(x), size):
        y = function(x[part])
        if len(y) == len(x):
            return y
        if out is None:
            out = y.new_empty(len(x), y.shape[-1])
        out[part] = y
        del y
    return function(x) if out is None else out


def finish_tokens(
    block: Block, x: Tensor, attended: Tensor, proj: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the output (T, C) of a block for the tokens x (T, C).

    attended (T, C): the output of attention for them, heads concatenated. proj: the output
    projection of attention.
    """

    def of_parts(part: slice) -> Tensor:
        y = x[part] + proj(attended[part])
        return y + block.mlp(block.norm2(y))

    out = None
    for part in parts(len(x), part_size(x.shape[-1], x.dtype)):
        y = of_parts(part)
        if len(y) == len(x):
            return y
        if out is None:
            out = torch.empty_like(x, dtype=y.dtype)
        out[part] = y
        del y
    return of_parts(slice(0, 0)) if out is None else out
