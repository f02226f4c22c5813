"""Block sizes, warps, pipeline stages and registers of the kernels, for each GPU architecture.

Those of sm_90 for up to 64 channels, except of the global kernel, are at most 1 % slower than the
fastest that `benchmarks/gpu.py sweep` found on an H200, with biases: with fewer registers, more
thread blocks fit on a multiprocessor, which is worth a few spilled registers. The others are chosen
from the table that `benchmarks/kernels.py` prints, not from timings. The criteria, in order of
priority:
1. The registers of windows do not spill, and two or more thread blocks fit on a multiprocessor.
2. On Hopper, matmuls have 64 rows, which the fastest instruction needs.
3. The inner loop has the fewest instructions per score. So blocks are large.
"""

from functools import partial
from typing import NamedTuple

HEAD_DIMS = (32, 64, 128)  # padded; each has a column in LAUNCHES


class Launch(NamedTuple):
    """Launch parameters of a kernel.

    queries, keys: the largest number of queries and of keys in a block.
    warps, stages: the number of warps and of pipeline stages.
    registers: the maximum number of registers per thread, on NVIDIA GPUs; 0 for no limit.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int = 0

    def options(self) -> dict[str, int]:
        """Return the launch options num_warps, num_stages and maxnreg of Triton."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers else {})


three = partial(Launch, registers=168)  # three thread blocks of 4 warps fit on a multiprocessor
four = partial(Launch, registers=128)  # four, or two of 8 warps
single = partial(Launch, stages=1)  # no asynchronous copies, which take shared memory

LAUNCHES = {  # {kind of GPU: {kernel: a launch per entry of HEAD_DIMS}}, for 16-bit dtypes
    "sm_80": {
        "forward": (Launch(64, 64), Launch(64, 64), Launch(64, 64)),
        "query": (Launch(64, 64), Launch(64, 64), Launch(64, 64)),
        "key": (Launch(32, 64), Launch(32, 64), Launch(32, 64)),
        "tile": (Launch(64, 64), Launch(64, 64), Launch(64, 32)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
    },
    "sm_90": {
        "forward": (Launch(64, 64), four(64, 64), Launch(64, 64)),
        "query": (Launch(64, 64), four(64, 64), Launch(64, 64)),
        "key": (Launch(64, 64), three(64, 64, stages=3), Launch(32, 64)),
        "tile": (four(64, 64, stages=3), four(64, 64, warps=8), Launch(64, 32)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
    },
    "sm_100": {
        "forward": (single(64, 64), single(64, 64), single(64, 64)),
        "query": (single(64, 64), single(64, 64), single(64, 64)),
        "key": (single(64, 64), single(64, 64), single(64, 64)),
        "tile": (single(64, 64), single(64, 64), single(64, 64)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
    },
    "gfx942": {
        "forward": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "query": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "key": (Launch(16, 64), Launch(16, 64), single(16, 64)),
        "tile": (Launch(64, 32), Launch(64, 32), single(64, 16)),
        "global": (Launch(32, 16), Launch(32, 16), Launch(32, 16)),
    },
}
# for all kernels in float32, without and with TF32
FLOAT32 = (Launch(32, 32), Launch(32, 32), Launch(32, 16))
TF32 = (Launch(64, 32), Launch(64, 32), Launch(64, 16))


def kind_of(target: str) -> str:
    """Return the key of LAUNCHES for a target such as "sm_89" or "gfx950".

    A Blackwell desktop GPU (sm_120) uses the key sm_80, because it has the same tensor instructions
    and shared memory.
    """
    if target.startswith("gfx"):
        return "gfx942"
    return {"sm_9": "sm_90", "sm_10": "sm_100"}.get(target[:-1], "sm_80")


def find_launch(target: str, kernel: str, padded: int, itemsize: int, tf32: bool) -> Launch:
    """Return the launch parameters of a kernel.

    target: architecture of the GPU, such as "sm_90".
    kernel: a name such as "forward", a key of `LAUNCHES["sm_80"]`.
    padded: the head dim, rounded up to a power of two.
    itemsize: bytes per element of q. tf32: whether matmuls in float32 may use TF32.
    """
    column = HEAD_DIMS.index(max(HEAD_DIMS[0], padded))
    if itemsize == 4:
        return (TF32 if tf32 else FLOAT32)[column]
    return LAUNCHES[kind_of(target)][kernel][column]
