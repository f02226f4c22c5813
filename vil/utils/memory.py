"""What a function would hold in tensors, reckoned without computing anything."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


@contextmanager
def reckoned() -> Iterator[HeldBytes]:
    """Inside, tensors have shapes and no numbers; `peak` tells what they would have taken.

    Operators that torch does not look into count with their results only.
    """
    with FakeTensorMode(), HeldBytes() as held:
        yield held
