"""Fix bugs of Triton's interpreter, which runs kernels on the CPU if TRITON_INTERPRET=1.

The interpreter of Triton 3.6 multiplies the bits of bfloat16 numbers instead of their values, and
truncates to bfloat16 instead of rounding. It also converts an array of one element to int, which
NumPy 2.4 forbids.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Patch Triton's interpreter, so that it computes the same results as a GPU.

    Call this function before kernels run.
    """
    builder: Any = interpreter.InterpreterBuilder
    patch = interpreter._patch_lang_tensor
    cast = builder.cast_impl

    def patch_tensor(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def cast_impl(self, source, target):
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widened(source.data), target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(rounded(source.data), target.scalar)
        return cast(self, source, target)

    def create_dot(self, a, b, start, input_precision, max_num_imprecise_acc):
        a, b = (widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        product = np.matmul(a, b, dtype=start.data.dtype) + start.data
        return interpreter.TensorHandle(product, start.dtype.scalar)

    interpreter._patch_lang_tensor = patch_tensor
    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def widened(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 numbers, stored as uint16, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to the nearest bfloat16, ties to even. Returns the bits as uint16."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, near).astype(np.uint16)
