"""Compile the Triton kernels for NVIDIA GPUs that this machine need not have, and count.

  python benchmarks/kernels.py                            for an H100, heads of 32 and 64 channels
  python benchmarks/kernels.py --targets sm_80 sm_90 --head-dims 128 --json FILE

Prints for each kernel: registers, bytes of spilled registers, shared memory, thread blocks that fit
on a multiprocessor, and the instructions of its inner loop that a warp scheduler issues for 64 x 64
scores (`per tile`). No time is measured.

Compiling takes about a second per kernel. It needs triton, with the assembler in its package.
"""

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from shared import add_json, make_parser

from vil.ops import Case, LocalBias, Window, patterns
from vil.ops.backends.triton import fused, launch
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.utils.text_table import align

GRID = (56, 56)
WINDOWS = {
    "chunks, w 7": (Window(GRID, 7), True),
    "chunks, w 8": (Window(GRID, 8), True),
    "chunks, w 8, no bias": (Window(GRID, 8), False),
    "exact, w 15": (Window(GRID, 15, 1), True),
    "axial | local:5, w 8": (Layout(GRID, 8, patterns.parse_pattern("axial | local:5")), True),
}
KERNELS = ("forward", "query", "key", "tile", "global")
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


@dataclasses.dataclass
class Row:
    """What one compiled kernel takes.

    queries, keys: size of the block of scores that it computes at a time. registers: per thread.
    spilled: bytes per thread. shared: bytes per thread block. blocks: thread blocks that fit on a
    multiprocessor. per_tile: instructions of the inner loop that a scheduler issues for 64 x 64
    scores. scalar_matmuls: matmuls that do not run on tensor cores.
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
    registers: int
    spilled: int
    shared: int
    blocks: int
    per_tile: int
    scalar_matmuls: int


class Driver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.target[3:]), 32)

    def get_current_device(self) -> str:
        return self.target  # a kernel has one cache per device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[dict[str, tuple[Any, dict]]]:
    """Compile kernels instead of running them. Yields {kernel: (compiled kernel, its options)}."""
    from triton.runtime.jit import JITFunction

    run, found = JITFunction.run, {}

    def compile_only(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(self.fn.__name__.removesuffix("_kernel"), (kernel, options))
        return kernel

    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def run_on_meta(case: Case) -> None:
    """Call both passes with tensors without data."""
    lead, window = (case.batch, case.heads), case.window
    keys = case.num_global + window.length
    with torch.device("meta"):
        # views of one tensor with queries, keys and values of all tokens, as in a model
        qkv = torch.empty(case.batch, keys, 3, case.heads, case.head_dim, dtype=case.dtype)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        q = q[:, :, case.num_global :]
        dout = torch.empty(*lead, window.length, case.head_dim, dtype=case.dtype)
        bias = LocalBias(
            torch.empty(case.heads, window.table_entries) if case.table_bias else None,
            torch.empty(case.heads, case.num_global) if case.global_bias else None,
        )
    call = Call(q, k, v, window, case.num_global, bias, None, case.head_dim**-0.5)
    out, lse = fused.forward(call)
    fused.backward(call, out, lse, dout)


def compile_kernels(target: str, window: str, dtype: str, head_dim: int) -> list[Row]:
    """Compile the kernels of an attention call."""
    from triton.runtime import driver

    driver.set_active(Driver(target))
    attended, has_bias = WINDOWS[window]
    case = Case(attended, 8, 6, head_dim, 1, getattr(torch, dtype), "cuda", has_bias, has_bias)
    assert not launch.interpreted(), "unset TRITON_INTERPRET"
    with compiling() as found:
        run_on_meta(case)
    return [
        make_row((target, window, dtype, head_dim), name, *found[name])
        for name in KERNELS
        if name in found
    ]


def make_row(case: tuple, name: str, kernel: Any, options: dict[str, Any]) -> Row:
    queries, keys, warps = options["Q"], options["K"], options["num_warps"]
    usage = cuobjdump("--dump-resource-usage", kernel.asm["cubin"])
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups()
    )
    loop = inner_loop(cuobjdump("-sass", kernel.asm["cubin"]))
    shared = kernel.metadata.shared
    by_registers = 4 * (512 // (-(-registers // 8) * 8)) // warps
    by_shared = SHARED_BYTES[case[0]] // (shared + 1024)
    tiles = queries * keys / 64**2
    layouts = re.findall(r"= tt\.dot .*-> tensor<[^#>]*#(\w+)>", kernel.asm["ttgir"])
    return Row(
        *case, name, queries, keys, warps, options["num_stages"], registers, stack + local, shared,
        min(by_registers, by_shared, 64 // warps), round(loop * warps / 4 / tiles),
        sum(not layout.startswith("mma") for layout in layouts),
    )  # fmt: skip


def cuobjdump(option: str, cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return run.stdout


def inner_loop(sass: str) -> int:
    """Count the instructions of the innermost loop with tensor core instructions."""
    lines = [match.groups() for raw in sass.splitlines() if (match := INSTRUCTION.match(raw))]
    at = {int(address, 16): number for number, (address, *_) in enumerate(lines)}
    loops = []
    for end, (address, opcode, operands) in enumerate(lines):
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands.strip())
        if opcode.startswith("BRA") and target and int(target[1], 16) < int(address, 16):
            body = [op.partition(".")[0] for _, op, _ in lines[at[int(target[1], 16)] : end + 1]]
            if any(op.endswith("MMA") for op in body):
                loops.append(len(body))
    return min(loops, default=0)


def compile_all(jobs: list[tuple], processes: int) -> Iterator[Row]:
    """Compile in processes, because a process has one Triton driver. Yields the rows in order."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(compile_kernels, *job) for job in jobs]:
            yield from future.result()


HEAD = (
    "window", "dtype", "D", "kernel", "block", "warps", "stages", "registers", "spilled",
    "shared", "blocks/SM", "per tile",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    block = f"{row.queries}x{row.keys}"
    return [
        row.window, row.dtype, row.head_dim, row.kernel, block, row.warps, row.stages,
        row.registers, row.spilled, row.shared, row.blocks, row.per_tile,
    ]  # fmt: skip


def run(args: argparse.Namespace) -> None:
    jobs = list(itertools.product(args.targets, WINDOWS, args.dtypes, args.head_dims))
    rows = list(compile_all(jobs, args.processes))
    for target in args.targets:
        table = [list(map(str, cells(row))) for row in rows if row.target == target]
        print(f"\n{target}\n{align([list(HEAD), *table])}")
    if args.json:
        import triton

        about = {"torch": torch.__version__, "triton": triton.__version__}
        lines = ",\n".join(json.dumps(vars(row)) for row in rows)
        args.json.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=["sm_90"], choices=list(SHARED_BYTES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--processes", type=int, default=2, help="compiling processes (2)")
    add_json(parser)
    run(parser.parse_args())
