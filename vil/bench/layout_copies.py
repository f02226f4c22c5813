"""Find the copies that change the memory layout of a model's tensors: they move data and compute
nothing.

A call counts if its result has the values of its input in another memory order, or without gaps: a
copy that makes a transposed or sliced tensor contiguous, a change between NCHW and NHWC. A change
of precision in the same order does not count. Copies inside of operators (a convolution's packing,
an attention backend's chunks) are not seen.
"""

import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vil.bench.module_scopes import ModuleScopes
from vil.utils.timing import synchronize

aten = torch.ops.aten
COPIES = (aten.clone, aten._to_copy, aten.copy_)


class Conversion(NamedTuple):
    """The calls of an operator in a module's forward or backward that changed a layout."""

    module: str
    way: str
    operator: str
    calls: int
    bytes: int
    share: float  # of the time of all operators


def conversions(
    model: nn.Module, images: Tensor, dtype: torch.dtype | None = None
) -> list[Conversion]:
    """The layout copies of one step on images (B, c, H, W), most expensive first, after a warm-up.

    dtype: the precision of autocast, None for full. The model's mode is kept.
    """
    run_step(model, images, dtype)
    with ModuleScopes(model) as scopes, CopyRecorder(scopes, images.device) as recorder:
        run_step(model, images, dtype)
    rows = [
        Conversion(*key, int(calls), int(size), seconds / recorder.seconds)
        for key, (calls, size, seconds) in recorder.copies.items()
    ]
    return sorted(rows, key=lambda row: -row.share)


def run_step(model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> None:
    """Forward and backward of the cross entropy of class 0."""
    model.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        logits = model(images)
        loss = F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))
    loss.backward()


class CopyRecorder(TorchDispatchMode):
    """Time every operator, and record calls, bytes and seconds of the layout copies."""

    def __init__(self, scopes: ModuleScopes, device: torch.device) -> None:
        super().__init__()
        self.scopes, self.device, self.seconds = scopes, device, 0.0
        self.copies: dict[tuple, list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        synchronize(self.device)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        if func.overloadpacket in COPIES:
            source = args[1] if func.overloadpacket is aten.copy_ else args[0]
            if changes_layout(source, result):
                key = (*self.scopes.current, func.overloadpacket.__name__)
                added = (1, result.nbytes, seconds)
                self.copies[key] = [a + b for a, b in zip(self.copies[key], added)]
        return result


def changes_layout(source: Any, result: Tensor) -> bool:
    """Whether the result has the values of the source in another memory order, or without gaps."""
    is_same = isinstance(source, Tensor) and source.shape == result.shape
    return is_same and memory_order(source) != memory_order(result)


def memory_order(x: Tensor) -> list[tuple[int, int]]:
    """Dimensions of more than one element with their strides, slowest first."""
    strides = [(d, x.stride(d)) for d in range(x.ndim) if x.shape[d] > 1]
    return sorted(strides, key=lambda pair: (-pair[1], pair[0]))
