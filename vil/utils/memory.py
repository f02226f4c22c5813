"""Copy tensors to a GPU without waiting, and count the bytes that a function would allocate."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the CPU to a device. The host does not wait for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def describe_out_of_memory(error: Exception) -> str:
    """Return what to do if an error means that a GPU or the machine is out of memory, else ""."""
    is_gpu, peak = isinstance(error, torch.OutOfMemoryError), ""
    if not (is_gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
        return ""
    if is_gpu and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        used = torch.cuda.max_memory_allocated()
        peak = f" (peak {used / 2**30:.1f} of {total / 2**30:.1f} GiB)"
    return (
        f"the {'GPU' if is_gpu else 'machine'} is out of memory{peak}: lower DATALOADER.BSZ and "
        "raise OPTIM.ACCUMULATE, set MODEL.GRAD_CHECKPOINT True, or lower INPUT.IMAGE_SIZE"
    )


class TensorMemory(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all live tensors that operators have returned. `now`
    is the current number of bytes, and `peak` the largest so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self.storages:
                storage = leaf.untyped_storage()
                self.storages.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def fake_memory() -> Iterator[TensorMemory]:
    """Run a `with` block on fake tensors, which have shapes but no values. Yields a TensorMemory,
    whose `peak` is the peak memory in bytes that real tensors would have used."""
    with FakeTensorMode(allow_non_fake_inputs=True), TensorMemory() as memory:
        yield memory
