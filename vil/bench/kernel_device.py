"""Load the attention kernels on this machine's GPU, and read what its driver says they take.

The driver may report other registers than the assembler did ahead of time, if it compiles again for
a newer GPU. The table of `vil.bench.kernel_table` is beside it where it has the GPU.
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
    """A kernel that is loaded on a GPU. key: see `KernelRow.key`. spilled: bytes per thread."""

    key: tuple
    registers: int
    spilled: int


def load_kernels(jobs: Iterable[tuple[str, str, int]]) -> Iterator[Loaded]:
    """Compile and load the kernels of (window, dtype, head dim) of `list_jobs`, without running
    them. Raises RuntimeError without a GPU, or if this process interprets kernels."""
    if not torch.cuda.is_available() or interpreted():
        raise RuntimeError(
            "loading kernels needs a CUDA device, and TRITON_INTERPRET must not be 1"
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
    """Format loaded kernels beside the rows of a table, with a last line that counts differences.

    A kernel without a row, because the table does not have this GPU, has dashes.
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
