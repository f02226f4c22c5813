"""Compile the Triton kernels of local attention for a target GPU, which this machine need not have.

A forward and a backward pass on meta tensors (tensors without data) record the kernel launches,
whose arguments are those of a real call. `compile_case` replaces Triton's active driver, of which a
process has only one. `compile_cases` therefore calls it in separate processes.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from vil.bench.kernel_resources import (
    AMDGCN,
    SASS,
    Resources,
    count_instructions,
    count_matmuls,
    parse_amd_usage,
    parse_usage,
)
from vil.ops import Case, LocalBias
from vil.ops.backends.triton import fused
from vil.ops.backends.triton.launch import interpreted, kernels
from vil.ops.call import Call

SECONDARY = ("table_kernel", "displacement_kernel")  # kernels that only sum, without a matmul


@dataclass(frozen=True)
class Recorded:
    """Record of a kernel launch.

    name: name of the kernel. kernel: the Triton kernel. arguments: its positional arguments, with
    meta tensors. grid: launch grid. options: compile-time constants of the kernel, and Triton's
    launch options, such as the number of warps.
    """

    name: str
    kernel: Any
    arguments: tuple
    grid: tuple[int, ...]
    options: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    """Kernel compiled for a target GPU.

    name: name of the kernel. options: compile-time constants of the kernel, and Triton's launch
    options. resources: registers, memory and instruction counts of the compiled kernel.
    """

    name: str
    options: dict[str, int]
    resources: Resources


class _Recorder:
    """Replacement for a kernel that records launches instead of running the kernel."""

    def __init__(self, name: str, kernel: Any, launches: list[Recorded]) -> None:
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments, **options) -> None:
            self.launches.append(Recorded(self.name, self.kernel, arguments, grid, options))

        return launch


@contextmanager
def _recording() -> Iterator[list[Recorded]]:
    """Replace the kernels by recorders in a `with` block. Yields the list of recorded launches."""
    namespace, launches = kernels(), []
    originals = {name: x for name, x in vars(namespace).items() if name.endswith("_kernel")}
    try:
        for name, kernel in originals.items():
            setattr(namespace, name, _Recorder(name, kernel, launches))
        yield launches
    finally:
        vars(namespace).update(originals)


def record_launches(case: Case) -> list[Recorded]:
    """Record the first launch of each kernel in the forward and backward pass of an attention call.
    Returns the launches in order.

    `case.device` is ignored, because all tensors are meta tensors. If `case.valid` is True, the
    kernels also get the valid size of each image.
    """
    window, lead, heads = case.window, (case.batch, case.heads), case.heads
    with torch.device("meta"):
        q, dout = (torch.empty(*lead, window.length, case.head_dim, dtype=case.dtype) for _ in "qo")
        length = case.num_global + window.length
        k, v = (torch.empty(*lead, length, case.head_dim, dtype=case.dtype) for _ in "kv")
        table = torch.empty(heads, window.table_entries) if case.table_bias else None
        to_global = torch.empty(heads, case.num_global) if case.global_bias else None
        valid_hw = torch.empty(case.batch, 2, dtype=torch.int64) if case.valid else None
    bias, scale = LocalBias(table, to_global), case.head_dim**-0.5
    call = Call(q, k, v, window, case.num_global, bias, valid_hw, scale)
    with _recording() as launches:
        out, lse = fused.forward(call)
        fused.backward(call, out, lse, dout)
    first: dict[str, Recorded] = {}
    for launch in launches:
        first.setdefault(launch.name, launch)
    return list(first.values())


class _Driver:
    """Triton driver with only the methods that compilation calls."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        if self.target.startswith("sm_"):
            return GPUTarget("cuda", int(self.target[3:]), 32)
        return GPUTarget("hip", self.target, 64 if self.target.startswith("gfx9") else 32)

    def get_current_device(self) -> str:
        return self.target  # a kernel has one cache per device

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_case(case: Case, target: str, names: Iterable[str] | None = None) -> list[Compiled]:
    """Compile the kernels of an attention call for a target GPU, such as "sm_90" or "gfx942".

    names: names of the kernels to compile; None for all kernels that run matmuls. Raises
    RuntimeError if TRITON_INTERPRET is 1.
    """
    if interpreted():
        raise RuntimeError(
            "cannot compile kernels while TRITON_INTERPRET is 1: unset TRITON_INTERPRET"
        )
    from triton.runtime import driver

    driver.set_active(_Driver(target))
    found = []
    for launch in record_launches(case):
        if launch.name in names if names else launch.name not in SECONDARY:
            kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            resources = read_resources(kernel.asm, kernel.metadata.shared)
            found.append(Compiled(launch.name, launch.options, resources))
    return found


def compile_cases(
    jobs: Iterable[tuple[Case, str]], processes: int = 2, cache: Path | None = None
) -> Iterator[list[Compiled]]:
    """Compile the kernels of attention calls in separate processes. Yields the kernels of each job.

    jobs: (attention call, target GPU) pairs, with targets such as "sm_90". cache: folder of
    Triton's cache; None for an empty temporary folder.
    """
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    with tempfile.TemporaryDirectory() as temporary, _environment(cache or temporary), pool:
        futures = [pool.submit(compile_case, *job) for job in jobs]
        for future in futures:
            yield future.result()


@contextmanager
def _environment(cache: str | Path) -> Iterator[None]:
    """Set environment variables for the processes that are started in a `with` block."""
    changes = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def read_resources(stages: dict[str, Any], shared: int) -> Resources:
    """Read the resources of a compiled kernel from the output of Triton's compiler.

    stages: {name of a compiler stage: output}, with "ttgir" and either "cubin" or "amdgcn".
    shared: bytes of shared memory per thread block.
    """
    matmuls, scalar = count_matmuls(stages["ttgir"])
    if "amdgcn" in stages:
        registers, spilled = parse_amd_usage(stages["amdgcn"])
        instructions = count_instructions(stages["amdgcn"], AMDGCN)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(stages["cubin"])
            file.flush()
            registers, spilled = parse_usage(_cuobjdump("--dump-resource-usage", file.name))
            instructions = count_instructions(_cuobjdump("-sass", file.name), SASS)
    return Resources(
        registers, spilled, shared,
        **instructions, matmuls=matmuls, scalar_matmuls=scalar,
    )  # fmt: skip


def _cuobjdump(*arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return run.stdout
