"""Copy batches to a GPU while it computes the previous step."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class CopyStream:
    """Runs a task's `prepare` on a CUDA stream of its own. On other devices, only calls it.

    The host is at most one step ahead of the GPU. So when it prepares a batch, the GPU still
    computes the previous step, and the copy from pinned memory, normalization and mixup overlap
    with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prepare(self, function: Callable[[T], T], batch: T) -> T:
        """Return function(batch). The current stream waits for it, the host does not."""
        if self.stream is None:
            return function(batch)
        with torch.cuda.stream(self.stream):
            prepared = function(batch)
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        for x in tree_leaves(getattr(prepared, "__dict__", prepared)):
            if isinstance(x, Tensor) and x.is_cuda:
                x.record_stream(current)  # its memory is not reused before this stream has read it
        return prepared
