"""Make tables of the resources of compiled kernels, and find regressions from an older table.

A row describes one kernel of an attention call, compiled for one target GPU. All calls have 8
images of 56 x 56 tokens, 6 heads, one global token, and a bias. They differ in the window
(WINDOWS), the dtype and the head dim.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from vil.bench.kernel_compile import Compiled, compile_cases
from vil.bench.kernel_resources import Resources, blocks_per_sm
from vil.ops import Case, Window, patterns
from vil.ops.layout import Layout
from vil.utils.text_table import align

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
HEAD_DIMS = (32, 48, 64, 96, 128)
GRID = (56, 56)
WINDOWS: dict[str, Window | Layout] = {
    "chunks, w 8": Window(GRID, 8),
    "exact, w 7": Window(GRID, 7, 1),
    "axial | local:5, w 8": Layout(GRID, 8, patterns.parse_pattern("axial | local:5")),
}
DTYPES = {"bfloat16": tuple(WINDOWS), "float16": tuple(WINDOWS)[:2]}  # {dtype: its windows}


@dataclass(frozen=True)
class KernelRow:
    """A kernel of an attention call, compiled for one target GPU.

    target: GPU architecture, such as "sm_90".
    window: a key of WINDOWS.
    queries, keys: size of the block of scores that the kernel computes at a time.
    warps: warps per thread block.
    stages: software pipelining stages.
    resources: registers, memory and instruction counts.
    blocks: thread blocks that fit on a multiprocessor.
    """

    target: str
    window: str
    dtype: str
    head_dim: int
    kernel: str
    queries: int
    keys: int
    warps: int
    stages: int
    resources: Resources
    blocks: int

    @property
    def key(self) -> tuple:
        """Tuple that identifies the row in a table: (target, window, dtype, head dim, kernel)."""
        return self.target, self.window, self.dtype, self.head_dim, self.kernel

    def __str__(self) -> str:
        return f"{self.kernel} for {self.target}, {self.window}, D {self.head_dim}, {self.dtype}"


def make_case(window: str, dtype: str, head_dim: int) -> Case:
    """Make the `Case`, the attention call that a table row describes. window: a key of WINDOWS.
    dtype: a key of DTYPES."""
    padded = window.startswith("exact")
    shape = (8, 6, head_dim, 1)
    return Case(WINDOWS[window], *shape, getattr(torch, dtype), "cuda", True, True, padded)


def list_jobs(
    targets: Sequence[str], head_dims: Sequence[int] = HEAD_DIMS, dtypes: Sequence[str] = (*DTYPES,)
) -> list[tuple[str, str, str, int]]:
    """List the attention calls to compile for each target GPU, as tuples (target, window, dtype,
    head dim)."""
    return [
        (target, window, dtype, dim)
        for target in targets
        for dtype in dtypes
        for window in DTYPES[dtype]
        for dim in head_dims
    ]


def compile_rows(
    jobs: Sequence[tuple[str, str, str, int]], processes: int = 2, cache: Path | None = None
) -> Iterator[KernelRow]:
    """Compile the kernels of each job. Yields a table row per kernel, in the order of `jobs`.

    jobs: result of `list_jobs`. processes, cache: see `compile_cases`.
    """
    work = [(make_case(*case), target) for target, *case in jobs]
    for job, kernels in zip(jobs, compile_cases(work, processes, cache)):
        yield from (make_row(*job, kernel) for kernel in kernels)


def make_row(target: str, window: str, dtype: str, head_dim: int, kernel: Compiled) -> KernelRow:
    """Make the table row of a compiled kernel."""
    options, resources = kernel.options, kernel.resources
    warps = options["num_warps"]
    blocks = blocks_per_sm(target, resources.registers, resources.shared, warps)
    keys = options.get("K", options.get("K_GLOBAL"))
    launch = (options["Q"], keys, warps, options["num_stages"])
    return KernelRow(
        target, window, dtype, head_dim, kernel.name.removesuffix("_kernel"), *launch, resources,
        blocks,
    )  # fmt: skip


def format_rows(rows: Sequence[KernelRow]) -> str:
    """Format kernel rows as text, with a table for each target GPU, window and dtype."""
    lines = []
    for group in dict.fromkeys(row.key[:3] for row in rows):
        lines += ["", ", ".join(group)]
        lines.append(align([HEAD, *(_cells(row) for row in rows if row.key[:3] == group)]))
    return "\n".join(lines[1:])


HEAD = [
    "kernel", "D", "block", "warps", "stages", "registers", "spilled B", "shared B", "blocks/SM",
    "tensor", "async", "local", "in loops", "scalar matmuls",
]  # fmt: skip


def _cells(row: KernelRow) -> list[str]:
    r = row.resources
    block = f"{row.queries}x{row.keys}"
    numbers = [
        row.warps, row.stages, r.registers, r.spilled, r.shared, row.blocks, r.tensor, r.async_copy,
        r.local, r.loop_local, r.scalar_matmuls,
    ]  # fmt: skip
    return [row.kernel, str(row.head_dim), block, *map(str, numbers)]


def find_regressions(before: Iterable[KernelRow], now: Iterable[KernelRow]) -> list[str]:
    """Return lines of text about the rows of a new table that are worse than in an older table, or
    that the older table does not have.

    before: rows of the older table. now: rows of the new table. A row is worse if its kernel spills
    more bytes, runs more matmuls without tensor cores, or fits fewer thread blocks on a
    multiprocessor.
    """
    known, found = {row.key: row for row in before}, []
    for row in now:
        if (old := known.get(row.key)) is None:
            found.append(f"{row} is not in the table")
            continue
        for what, was, value in (
            ("spilled bytes", old.resources.spilled, row.resources.spilled),
            ("scalar matmuls", old.resources.scalar_matmuls, row.resources.scalar_matmuls),
            ("blocks per SM", -old.blocks, -row.blocks),
        ):
            if value > was:
                found.append(f"{row}: {abs(value)} {what}, {abs(was)} in the table")
    return found


def write_table(file: Path, rows: Iterable[KernelRow], about: dict) -> None:
    """Write a table as JSON, with a line per row. about: metadata, such as the Triton version."""
    lines = [json.dumps(asdict(row)) for row in rows]
    text = ",\n".join(lines)
    file.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{text}\n]}}\n')


def read_table(file: Path) -> tuple[list[KernelRow], dict]:
    """Read a table that `write_table` wrote. Returns (rows, about), where `about` is the metadata.
    Raises ValueError if the file has another format."""
    data = json.loads(file.read_text())
    names = {field.name for field in fields(KernelRow)}
    rows = data.get("rows", [{}]) if isinstance(data, dict) else [{}]
    if any(set(row) != names for row in rows):
        raise ValueError(
            f"{file} is not a table of kernels that this version of vil can read: create a new one"
        )
    rows = [
        KernelRow(**{**row, "resources": Resources(**row["resources"])}) for row in data["rows"]
    ]
    return rows, data["about"]
