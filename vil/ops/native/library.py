"""Load the compiled C++ code of this folder, and compile it first if needed.

A wheel has the compiled libraries. Where they do not fit, the library is compiled at first use, in
about ten seconds, and stored in $VIL_CACHE/native (see `vil.utils.cache_dir`). If the cache cannot
be written, each process compiles its own copy. VIL_NATIVE=0 turns the library off.
"""

import ctypes
import functools
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.native import build
from vil.utils.cache_dir import cache_dir, hold_lock
from vil.utils.machine import search_file

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
VARIABLE = "VIL_NATIVE"


class Library(NamedTuple):
    """The result of loading the library.

    functions: the loaded library; None if there is a problem.
    instructions: its instruction set, a key of `build.INSTRUCTION_SETS`.
    origin: where it is from, such as "the package".
    problem: why it cannot be used, or "".
    """

    functions: ctypes.CDLL | None = None
    instructions: str = ""
    origin: str = ""
    problem: str = ""


@functools.cache
def instruction_sets() -> list[str]:
    """Return the keys of `build.INSTRUCTION_SETS` that this CPU has and torch uses, best first.

    torch uses fewer than the CPU has if the environment variable ATEN_CPU_CAPABILITY says so.
    """
    flags = set((search_file(r"flags\s*:(.*)", "/proc/cpuinfo") or "").split())
    allowed = {"AVX2": ["avx2"], "DEFAULT": []}
    names = allowed.get(torch.backends.cpu.get_cpu_capability(), build.INSTRUCTION_SETS)
    return [name for name in names if flags.issuperset(build.INSTRUCTION_SETS[name])]


@torch.compiler.assume_constant_result
def has_bfloat16() -> bool:
    """Return whether the library can multiply in bfloat16, which needs AVX512-BF16."""
    return _instructions() in ("amx", "avx512_bf16")


def _instructions() -> str:
    """Return the instruction set of the loaded library, or the one to try first."""
    if _load.cache_info().currsize:
        return _load().instructions
    return next(iter(instruction_sets()), "")


@torch.compiler.assume_constant_result
def arithmetic(dtype: torch.dtype) -> str:
    """Return how the library multiplies matrices of a dtype: "float32", "bfloat16", or "amx" for
    bfloat16 with the CPU's matrix unit. On CPUs of AMD, where torch's float32 matmuls are slower,
    the first is "float32 on AMD"."""
    if dtype == torch.float32:
        return "float32 on AMD" if _is_amd() else "float32"
    return "amx" if _instructions() == "amx" else "bfloat16"


@functools.cache
def _is_amd() -> bool:
    return search_file(r"vendor_id\s*:\s*(\w+)", "/proc/cpuinfo") == "AuthenticAMD"


_off: list[str] = []  # why the library is not used, see `turn_off`


def turn_off(reason: str) -> None:
    """Do not use the library in this process, because another rank of the run cannot."""
    _off[:] = [reason]


@torch.compiler.assume_constant_result
def obstacle() -> str:
    """Return a reason why the library cannot be loaded or compiled on this machine.

    Returns "" if no reason is known yet. Compilation may still fail.
    Raises ValueError if the environment variable VIL_NATIVE is neither 0 nor 1.
    """
    if _off:
        return _off[0]
    return _load().problem if _load.cache_info().currsize else _obstacle()


@functools.cache
def _obstacle() -> str:
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 (no compiled code) or 1, not {value!r}")
    if value == "0":
        return f"{VARIABLE}=0 turns it off"
    if sys.platform != "linux" or not instruction_sets():
        return f"it needs Linux and a CPU with AVX2, not {sys.platform} on {platform.machine()}"
    names = instruction_sets()
    files = [file for name in names for file in (_shipped(name), path(name))]
    if build.compiler() or any(map(os.path.exists, files)):  # False for an unreadable folder
        return ""
    return build.MISSING.format(os.environ.get("CXX") or ", ".join(build.COMPILERS))


def unsupported(device: str, dtype: torch.dtype) -> list[str]:
    """Return the reasons why the library cannot compute in a dtype on a device type such as "cpu".

    Returns an empty list if it can, unless its compilation fails.
    """
    if device != "cpu":
        return [f"it needs a CPU, not {device}"]
    if dtype not in DTYPES:
        return [f"it computes in float32 and bfloat16, not in {str(dtype)[6:]}"]
    if reason := obstacle():
        return [reason]
    if dtype == torch.bfloat16 and not has_bfloat16():
        return ["bfloat16 needs a CPU with AVX512-BF16"]
    return []


@torch.compiler.assume_constant_result
def prepare() -> list[str]:
    """Load the library, and compile it first if needed.

    Returns the reasons for a failure, or an empty list if the library is loaded. The result and the
    library are kept until the process ends.
    """
    if _off:
        return list(_off)
    return [text for text in [_load().problem] if text]


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether the library is loaded and can compute in a dtype on this CPU. Compiles it
    first if needed."""
    return not prepare() and not unsupported("cpu", dtype)


def describe() -> str:
    """Describe in one line whether the library can be used, and with which instructions. Loads it,
    and compiles it first if needed."""
    if reasons := prepare():
        return f"not used: {reasons[0]}"
    return f"{_load().instructions}, from {_load().origin}"


@functools.cache
def path(instructions: str) -> Path:
    """Return the path of the library in the cache, compiled for a key of `build.INSTRUCTION_SETS`.

    The path contains the version of the C library and a hash of the sources, because a home folder
    may be shared by different machines.
    """
    libc = "-".join(platform.libc_ver()) or "libc"
    folder = f"{libc}-{build.source_digest()}"
    return cache_dir() / "native" / folder / f"{instructions}.so"


def _shipped(instructions: str) -> Path:
    return build.BUILT / f"{instructions}.so"


@functools.cache
def _load() -> Library:
    """Load the library for the best instruction set for which it is shipped or can be compiled."""
    if reason := _obstacle():
        return Library(problem=reason)
    problems = []
    for name in instruction_sets():
        if os.path.exists(_shipped(name)):
            try:
                return Library(_open(_shipped(name)), name, "the package")
            except OSError as error:  # built for a newer C library, for example
                log.info("the package's native library cannot be loaded: %s", error)
        try:
            functions = _open_compiled(name)
        except (build.CompilerError, OSError) as error:  # an old compiler may not know AMX
            problems.append(str(error))
            continue
        if problems:
            log.info("the native library is for %s only: %s", name, problems[0])
        return Library(functions, name, "the cache")
    log.warning("the native library is not used, so attention is slower: %s", problems[0])
    return Library(problem=problems[0])


def _open(file: Path) -> ctypes.CDLL:
    """Load a library. Raises OSError if it is damaged or does not fit this machine."""
    if not build.is_complete(file):
        raise OSError(f"{file} is damaged")
    functions = ctypes.CDLL(str(file))
    functions.vil_use_openmp(_openmp())
    return functions


def _openmp() -> ctypes.c_void_p:
    """Return the address of OpenMP's GOMP_parallel, in the copy of OpenMP that torch uses.

    Returns a null pointer if torch does not use OpenMP.
    """
    torch_library = ctypes.CDLL(torch._C.__file__)  # a symbol is searched in all that it depends on
    function = getattr(torch_library, "GOMP_parallel", None)
    # pyrefly: ignore[bad-argument-type]  # None is a null pointer
    return ctypes.cast(function, ctypes.c_void_p)


def _open_compiled(instructions: str) -> ctypes.CDLL:
    """Load the library from the cache, compiling it first if it is missing or damaged.

    If the cache cannot be written, the library is compiled to a temporary folder.
    Raises `build.CompilerError` if it cannot be compiled, and OSError if it cannot be loaded.
    """
    file = path(instructions)
    try:
        if not (file.exists() and build.is_complete(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(file.parent):  # another process may be compiling it
                if not (file.exists() and build.is_complete(file)):
                    _compile(file, instructions)
        return _open(file)
    except OSError as error:
        log.warning(
            "the cache cannot be used, so the native library is compiled for this process only: %s",
            error,
        )
        with tempfile.TemporaryDirectory(prefix="vil-native-") as folder:
            _compile(Path(folder, file.name), instructions)
            return _open(Path(folder, file.name))


def _compile(file: Path, instructions: str) -> None:
    start = time.perf_counter()
    build.compile_to(file, instructions)
    seconds = time.perf_counter() - start
    log.info("compiled the native library (%s) in %.0f s", instructions, seconds)


@functools.cache
def _function(name: str) -> ctypes._CFuncPtr:
    """Return a function of the library. Raises RuntimeError if the library cannot be used."""
    if reasons := prepare():
        raise RuntimeError(f"the native library cannot be used: {reasons[0]}")
    function = getattr(_load().functions, name)
    function.restype = ctypes.c_char_p
    return function


def as_float32(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Return {name: contiguous float32 tensor} for the tensors that are not None."""
    return {
        name: x
        if x.dtype == torch.float32 and x.is_contiguous()
        else x.detach().float().contiguous()
        for name, x in tensors.items()
        if x is not None
    }


def call(name: str, numbers: ctypes.Structure, is_backward: bool) -> None:
    """Call a function of the library.

    name: an `extern "C"` function of library.cpp. numbers: the C structure that holds its
    arguments. is_backward: whether to run the backward pass.
    Raises RuntimeError if the function fails, for example because memory cannot be allocated.
    """
    if error := _function(name)(ctypes.byref(numbers), int(is_backward)):
        raise RuntimeError(f"the native library failed: {error.decode()}")
