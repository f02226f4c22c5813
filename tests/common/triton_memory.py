"""Run interpreted Triton kernels under checks of every address.

Each storage that a kernel gets lies in a zone of its own of a virtual address space, far from the
others. A load or store outside the storage of the argument that its pointer was computed from is
an error, also where the real address would be valid memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

ZONE = 44  # bits of the offset in a zone; more than the bytes of any storage


@contextmanager
def checked_memory() -> Iterator[list[int]]:
    """Check loads and stores of kernels until the end of the block.

    Yields a list to which the size of each access is appended. A kernel that leaves its arguments
    raises the interpreter's error, with an IndexError in its text.
    """
    from triton.runtime import interpreter

    builder, convert = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    zones: dict[int, tuple[int, int]] = {}  # address of a storage: number of its zone, its bytes
    sizes: list[int] = []

    def to_argument(arg: object) -> object:
        result = convert(arg)
        if hasattr(arg, "data_ptr"):
            storage = arg.untyped_storage()
            zone, _ = zones.get(storage.data_ptr(), (len(zones) + 1, 0))
            zones[storage.data_ptr()] = zone, storage.nbytes()  # it may be another one by now
            inside = arg.data_ptr() - storage.data_ptr()
            result.handle.data = np.array([(zone << ZONE) + inside], dtype=np.uint64)
        return result

    def real(pointers, mask):
        """The real pointers where the mask is true, else any."""
        width = pointers.get_element_ty().primitive_bitwidth // 8
        zone, inside = pointers.data >> ZONE, pointers.data & ((1 << ZONE) - 1)
        bases = np.zeros(len(zones) + 1, np.uint64)
        limits = np.zeros(len(zones) + 1, np.int64)
        for base, (number, size) in zones.items():
            bases[number], limits[number] = base, size
        known = np.minimum(zone, len(zones)).astype(np.int64)
        outside = (zone > len(zones)) | (inside.astype(np.int64) + width > limits[known])
        if np.any(outside & mask.data):
            raise IndexError(f"{(outside & mask.data).sum()} addresses are outside the arguments")
        sizes.append(int(mask.data.sum()))
        return interpreter.TensorHandle(bases[known] + inside, pointers.dtype)

    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        return load(self, real(pointers, mask), mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        return store(self, real(pointers, mask), value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", to_argument)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        # tensors are on the CPU already; copying them back would touch all of a huge storage
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
        yield sizes
