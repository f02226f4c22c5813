"""A Triton kernel that multiplies and rounds bfloat16 numbers. Import it where Triton may run."""

import triton
import triton.language as tl


@triton.jit
def dot_kernel(A, B, OUT, EXACT, ROUNDED, SIDE: tl.constexpr):
    """OUT = A @ B and ROUNDED = EXACT in bfloat16; all (SIDE, SIDE), OUT and EXACT float32."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(OUT + at, tl.dot(tl.load(A + at), tl.load(B + at)))
    tl.store(ROUNDED + at, tl.load(EXACT + at).to(tl.bfloat16))
