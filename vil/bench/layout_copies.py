"""Where a model's tensors change their layout in memory: such a copy moves data, computes nothing.

A call counts if its result holds the numbers of its input in another order of memory or closes gaps
between them: a copy that makes contiguous what was transposed or cut out, a change between NCHW and
NHWC. A change of precision does not count if the order stays. What an operator does inside (a
convolution's own packing, an attention backend's chunks) is its own business and not seen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vil.bench.module_scopes import Places
from vil.utils.timing import synchronize

aten = torch.ops.aten
COPIES = (aten.clone, aten._to_copy, aten.copy_)


class Conversion(NamedTuple):
    """The calls of one operator in one module, in forward or backward, that changed a layout."""

    module: str
    way: str
    operator: str
    calls: int
    bytes: int
    share: float  # of the time of all operators


def conversions(
    model: nn.Module, images: Tensor, dtype: torch.dtype | None = None
) -> list[Conversion]:
    """Those of one step on images (B, c, H, W), the costliest first; one step before it warms up.

    dtype: the precision of autocast, None for full. The model stays in the mode it is in.
    """
    step(model, images, dtype)
    with Places(model) as places, _Watch(places, images.device) as watch:
        step(model, images, dtype)
    found = [
        Conversion(*key, int(calls), int(size), seconds / watch.seconds)
        for key, (calls, size, seconds) in watch.found.items()
    ]
    return sorted(found, key=lambda row: -row.share)


def step(model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> None:
    """Forward and backward of the cross entropy of class 0."""
    model.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        logits = model(images)
        loss = F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))
    loss.backward()


class _Watch(TorchDispatchMode):
    """Times every operator, and notes the copies among them."""

    def __init__(self, places: Places, device: torch.device) -> None:
        super().__init__()
        self.places, self.device, self.seconds = places, device, 0.0
        self.found: dict[tuple, list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        synchronize(self.device)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if func.overloadpacket in COPIES and converts(func, args, result):
            row = self.found[(*self.places.now, func.overloadpacket.__name__)]
            row[0] += 1
            row[1] += result.nbytes
            row[2] += seconds
        return result


def converts(func: Any, args: tuple, result: Tensor) -> bool:
    """Whether the result's numbers lie in another order than those of the input, or closer."""
    source = args[1] if func.overloadpacket is aten.copy_ else args[0]
    if not isinstance(source, Tensor) or source.shape != result.shape:
        return False
    return places_in_memory(source) != places_in_memory(result)


def places_in_memory(x: Tensor) -> list[tuple[int, int]]:
    """Each dimension and its stride, the slowest first; those of one element lie nowhere."""
    real = [(d, x.stride(d)) for d in range(x.ndim) if x.shape[d] > 1]
    return sorted(real, key=lambda pair: (-pair[1], pair[0]))
