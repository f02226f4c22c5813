"""Buffers and batch sizes for backends that compute one batch of chunks at a time.

A batch has few MiB of scores, and all batches use the same buffers.
"""

import math

import torch
from torch import Tensor

BATCH_BYTES = 1 << 24  # scores of a batch: few large operations, which a busy machine delays less


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to use for scores and sums: float64 if x is float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def split_range(span: slice, size: int) -> list[slice]:
    """Split a range into consecutive ranges of at most `size` elements."""
    starts = range(span.start, span.stop, size)
    return [slice(start, min(start + size, span.stop)) for start in starts]


def even_share(count: int, limit: int) -> int:
    """Return the length of the parts if `count` elements are divided as evenly as possible.

    A part has at most `limit` elements (1 if `limit` is below 1), and there are as few parts as
    possible. The last part may be shorter than the others.
    """
    parts = -(-count // max(1, limit))
    return -(-count // parts)


class Scratch:
    """Named buffers that are reused for each batch of chunks.

    Allocating new memory would take as long as a matmul.
    """

    def __init__(self, like: Tensor) -> None:
        self.like, self.buffers = like, {}

    def take(self, buffer: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the memory of the named buffer.

        Writing to it overwrites the previous tensor of this dtype that was taken from the buffer.
        """
        size, key = math.prod(shape), (buffer, dtype)
        if key not in self.buffers or len(self.buffers[key]) < size:
            self.buffers[key] = self.like.new_empty(size, dtype=dtype)
        return self.buffers[key][:size].view(shape)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the batched matmul a @ b in a reused buffer.

        The result is float64 if a and b are float64, else float32.
        """
        shape = (*a.shape[:2], b.shape[2])
        product = torch.bmm(a, b, out=self.take("product", shape, a.dtype))
        return self.cast(product, wide(a), "wide")

    def cast(self, x: Tensor, dtype: torch.dtype, buffer: str = "cast") -> Tensor:
        """Return x if it has this dtype, else a converted copy of x in the named buffer."""
        return x if x.dtype == dtype else self.take(buffer, x.shape, dtype).copy_(x)
