"""Load the attention kernels on this machine's GPU, and read their register use from the driver.

A table of `vil.bench.kernel_table` has the assembler's numbers for the same kernels. The driver's
numbers differ from them if the driver compiles a kernel again for a newer GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vil.bench.kernel_compile import SECONDARY, record_launches
from vil.bench.kernel_table import KernelRow, make_case
from vil.ops.backends.triton.launch import current_target, interpreted
from vil.utils.text_table import align


@dataclass(frozen=True)
class Loaded:
    """Kernel that is loaded on a GPU.

    key: (target, window, dtype, head dim, kernel), as in `KernelRow.key`. registers: number of
    registers per thread. spilled: bytes of spilled registers per thread.
    """

    key: tuple
    registers: int
    spilled: int


def load_kernels(jobs: Iterable[tuple[str, str, int]]) -> Iterator[Loaded]:
    """Compile and load kernels on the current GPU, without running them.

    jobs: (window, dtype, head dim) tuples, such as ("exact, w 7", "float16", 64). Yields the loaded
    kernels. Raises RuntimeError if there is no GPU, or if TRITON_INTERPRET is 1.
    """
    if not torch.cuda.is_available() or interpreted():
        raise RuntimeError(
            "cannot load kernels: use a machine with a CUDA device, and unset TRITON_INTERPRET"
        )
    torch.cuda.synchronize()  # creates the context that loading needs
    target = current_target()
    for window, dtype, head_dim in jobs:
        for launch in record_launches(make_case(window, dtype, head_dim)):
            if launch.name in SECONDARY:
                continue
            kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            kernel._init_handles()  # a launch would call it
            name = launch.name.removesuffix("_kernel")
            key = (target, window, dtype, head_dim, name)
            yield Loaded(key, kernel.n_regs, 4 * kernel.n_spills)


def compare(loaded: Sequence[Loaded], rows: Iterable[KernelRow]) -> str:
    """Format the numbers of loaded kernels, next to those in a table, as text.

    rows: the rows of the table. A kernel without a row, for example because the table does not
    include this GPU, has dashes. The last line counts the kernels that differ from their rows, and
    those without a row.
    """
    known = {row.key: row for row in rows}
    lines = [["kernel", "D", "window", "dtype", "registers", "table", "spilled B", "table"]]
    differing = 0
    for kernel in loaded:
        _, window, dtype, head_dim, name = kernel.key
        row = known.get(kernel.key)
        table = (row.resources.registers, row.resources.spilled) if row else ("-", "-")
        differing += row is not None and table != (kernel.registers, kernel.spilled)
        found = [kernel.registers, table[0], kernel.spilled, table[1]]
        lines.append([name, str(head_dim), window, dtype, *map(str, found)])
    absent = sum(kernel.key not in known for kernel in loaded)
    counts = f"{len(loaded)} kernels, {differing} differ from the table, {absent} are not in it"
    return f"{align(lines)}\n{counts}"
