"""Block sizes, warps, pipeline stages and registers of the kernels, for each GPU architecture.

They are chosen from the table that `benchmarks/kernels.py` prints, not from timings on a GPU. The
criteria, in order of priority:
1. Registers do not spill.
2. On Hopper, matmuls have 64 rows, which the fastest instruction needs.
3. Three or more thread blocks fit on a multiprocessor.
4. Blocks are large, so that each key is read less often.
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


three = partial(Launch, registers=168)  # three thread blocks fit on a multiprocessor
four = partial(Launch, registers=128)  # four thread blocks fit on a multiprocessor

LAUNCHES = {  # {kind of GPU: {kernel: a launch per entry of HEAD_DIMS}}, for 16-bit dtypes
    "sm_80": {
        "forward": (four(64, 32), three(64, 32), Launch(64, 16)),
        "query": (three(64, 16), four(32, 32), Launch(32, 32)),
        "key": (Launch(16, 64), four(32, 32), Launch(32, 32)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
        "tile": (three(64, 16), Launch(64, 32), Launch(64, 32)),
        "step": (three(64, 16), Launch(64, 32), Launch(64, 32)),
    },
    "sm_90": {
        "forward": (three(64, 32), three(64, 32), Launch(64, 32)),
        "query": (three(64, 16), Launch(64, 32), Launch(64, 16)),
        "key": (three(16, 64), Launch(32, 64), Launch(16, 64)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
        "tile": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "step": (Launch(64, 32), Launch(64, 32), Launch(64, 16)),
    },
    "sm_100": {
        "forward": (three(64, 16), three(64, 16), Launch(64, 32, stages=1)),
        "query": (three(64, 16), Launch(64, 32, stages=1), Launch(64, 16)),
        "key": (three(16, 64), Launch(16, 64), Launch(16, 64, stages=1)),
        "global": (Launch(64, 16), Launch(64, 16), Launch(32, 16)),
        "tile": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "step": (Launch(64, 32), Launch(64, 32), Launch(64, 16)),
    },
    "gfx942": {
        "forward": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "query": (Launch(64, 16), Launch(64, 16), Launch(64, 16)),
        "key": (Launch(16, 64), Launch(16, 64), Launch(16, 64, stages=1)),
        "global": (Launch(32, 16), Launch(32, 16), Launch(32, 16)),
        "tile": (Launch(64, 32), Launch(64, 32), Launch(64, 16, stages=1)),
        "step": (Launch(64, 32), Launch(64, 32), Launch(64, 16, stages=1)),
    },
}
# for all kernels in float32, which do not use tensor cores
FLOAT32 = (Launch(32, 32), Launch(32, 32), Launch(32, 16))


def kind_of(target: str) -> str:
    """Return the key of LAUNCHES for a target such as "sm_89" or "gfx950".

    A Blackwell desktop GPU (sm_120) uses the key sm_80, because it has the same tensor instructions
    and shared memory.
    """
    if target.startswith("gfx"):
        return "gfx942"
    return {"sm_9": "sm_90", "sm_10": "sm_100"}.get(target[:-1], "sm_80")


def find_launch(target: str, kernel: str, padded: int, itemsize: int) -> Launch:
    """Return the launch parameters of a kernel.

    target: architecture of the GPU, such as "sm_90".
    kernel: a name such as "forward", a key of `LAUNCHES["sm_80"]`.
    padded: the head dim, rounded up to a power of two.
    itemsize: bytes per element of q.
    """
    column = HEAD_DIMS.index(max(HEAD_DIMS[0], padded))
    return (FLOAT32 if itemsize == 4 else LAUNCHES[kind_of(target)][kernel])[column]
