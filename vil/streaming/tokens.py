"""Run the per-token layers of a block on slices of the tokens, to limit activation memory.

Per-token layers, such as linear layers and norms, process each token independently.

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
    """Return the maximum number of tokens for which the activations of an MLP fit into PART_BYTES.
    The activations have about 9 * channels values per token."""
    return max(1, PART_BYTES // (9 * channels * dtype.itemsize))


_sizes_only = ContextVar("sizes_only", default=False)


@contextmanager
def sizes_only() -> Iterator[None]:
    """Make the function `parts` return only the first and the last slice inside a `with` block. Two
    slices are enough to count the peak memory."""
    token = _sizes_only.set(True)
    try:
        yield
    finally:
        _sizes_only.reset(token)


def parts(count: int, size: int) -> Iterator[slice]:
    """Return slices that divide `count` tokens into ranges of at most `size` tokens."""
    starts = range(0, count, size)
    if _sizes_only.get():
        starts = sorted({*starts[:1], *starts[-1:]})
    return (slice(first, min(first + size, count)) for first in starts)


def map_parts(function: Callable[[slice], Tensor], count: int, size: int) -> Tensor:
    """Call a function on slices of at most `size` of `count` tokens, and join the results.

    function: takes a slice of t tokens, and returns (t, F). It must process each token
    independently. Returns (count, F).
    """
    out = None
    for part in parts(count, size):
        y = function(part)
        if len(y) == count:
            return y
        if out is None:
            out = y.new_empty(count, y.shape[-1])
        out[part] = y
        del y
    return function(slice(0, 0)) if out is None else out


def finish_tokens(
    block: Block, x: Tensor, attended: Tensor, proj: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply the layers of a block after the attention. Returns the block's output (T, C).

    x (T, C): the block's input. attended (T, C): the attention output before its projection, with
    concatenated heads. proj: the output projection of the attention.
    """

    def of_part(part: slice) -> Tensor:
        y = x[part] + proj(attended[part])
        return y + block.mlp(block.norm2(y))

    return map_parts(of_part, len(x), part_size(x.shape[-1], x.dtype))
