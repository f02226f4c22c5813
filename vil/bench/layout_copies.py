"""Find layout copies in a model: copies that only change the memory layout of a tensor.

Examples are making a transposed tensor contiguous, and converting NCHW to NHWC. Copies inside an
operator, such as a convolution or an attention backend, are not detected.
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
    """Copies, by one operator in one module, that only change the memory layout of a tensor.

    way: the pass, "forward" or "backward". calls, bytes: number and total size of the copies in one
    training step. share: time of the copies, divided by the time of all operators.
    """

    module: str
    way: str
    operator: str
    calls: int
    bytes: int
    share: float


def conversions(
    model: nn.Module, images: Tensor, dtype: torch.dtype | None = None
) -> list[Conversion]:
    """List the copies in a training step that only change a memory layout, longest time first.

    images: (B, c, H, W). dtype: the autocast dtype; None for no autocast.
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
    """Run a forward and a backward pass with cross entropy loss. All targets are class 0."""
    model.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        logits = model(images)
        loss = F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))
    loss.backward()


class CopyRecorder(TorchDispatchMode):
    """Dispatch mode that times every operator, and records copies that only change the layout.

    copies: {(module, "forward" or "backward", operator): [calls, bytes, seconds]}.
    seconds: total time of all operators, including those that copy nothing.
    """

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
    """Return whether two tensors have the same shape but different memory orders."""
    is_same = isinstance(source, Tensor) and source.shape == result.shape
    return is_same and memory_order(source) != memory_order(result)


def memory_order(x: Tensor) -> list[tuple[int, int]]:
    """Return a list of (dimension, stride), sorted by stride, largest first. Dimensions of size 1
    are omitted, because their stride has no effect."""
    strides = [(d, x.stride(d)) for d in range(x.ndim) if x.shape[d] > 1]
    return sorted(strides, key=lambda pair: (-pair[1], pair[0]))
