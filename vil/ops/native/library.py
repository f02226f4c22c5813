"""Compile the C++ sources of this folder, and load the library.

The library is compiled at first use, in about ten seconds, and stored in $VIL_CACHE/native (see
`vil.utils.cache_dir`). If the cache cannot be written, each process compiles its own copy. The
library uses torch's copy of OpenMP, because a process must have only one copy.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from vil.utils.cache_dir import cache_dir, hold_lock
from vil.utils.machine import search_file

log = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.h")) + [Path(__file__).with_name("library.cpp")]
DTYPES = (torch.float32, torch.bfloat16)
OPTIONS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-w"]
INSTRUCTIONS = {  # {capability: compiler options, which torch's kernels use as well}
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
AMX = ("-mamx-tile", "-mamx-bf16")
COMPILERS = ("g++", "c++", "clang++")
MAX_SECONDS = 300  # of the compiler


@functools.cache
def capability() -> str:
    """Return torch's name for the CPU's instruction set, such as "AVX512"."""
    return torch.backends.cpu.get_cpu_capability()


@torch.compiler.assume_constant_result
def has_bfloat16() -> bool:
    """Return whether the CPU has instructions for bfloat16 dot products (AVX512-BF16)."""
    return capability() == "AVX512" and "avx512_bf16" in _cpu_flags()


@functools.cache
def _cpu_flags() -> list[str]:
    return (search_file(r"flags\s*:(.*)", "/proc/cpuinfo") or "").split()


def compiler() -> list[str]:
    """Return the path of the C++ compiler and its arguments, or an empty list if there is none.

    The compiler is $CXX, which may include arguments ("ccache g++"). If CXX is not set, it is the
    first of COMPILERS that is installed.
    """
    text = os.environ.get("CXX", "").strip()
    commands = [[text], text.split()] if text else [[name] for name in COMPILERS]
    found = ([shutil.which(name), *arguments] for name, *arguments in commands)
    return next((command for command in found if command[0]), [])


@functools.cache
def path() -> Path:
    """Return the path of the compiled library in the cache.

    The path contains torch's version, the CPU's instruction set, and a hash of the sources and of
    the compiler's options.
    """
    digest = hashlib.sha256()
    for part in [*_options(), *(source.read_bytes() for source in SOURCES)]:
        digest.update(part if isinstance(part, bytes) else part.encode())
    folder = f"torch-{torch.__version__}-{capability()}-{digest.hexdigest()[:12]}"
    return cache_dir() / "native" / folder / "library.so"


@torch.compiler.assume_constant_result
def obstacle() -> str:
    """Return a reason why the library cannot be loaded or compiled on this machine.

    Returns "" if no reason is known before compilation, which may still fail.
    """
    return _obstacle()


@functools.cache
def _obstacle() -> str:
    if sys.platform != "linux" or capability() not in INSTRUCTIONS:
        return f"it needs Linux and AVX2 or AVX512, not {sys.platform} and {capability()}"
    if not compiler() and not path().exists():
        names = os.environ.get("CXX") or ", ".join(COMPILERS)
        return f"no C++ compiler ({names}) was found: install one, or set CXX to its path"
    return ""


def unsupported(device: str, dtype: torch.dtype) -> list[str]:
    """Return the reasons why the library cannot compute in a dtype on a device type such as "cpu".

    Returns an empty list if it can, unless its compilation fails.
    """
    no_bfloat16 = dtype == torch.bfloat16 and not has_bfloat16()
    checks = {
        f"it needs a CPU, not {device}": device != "cpu",
        f"it computes in float32 and bfloat16, not in {str(dtype)[6:]}": dtype not in DTYPES,
        "bfloat16 needs a CPU with AVX512-BF16": no_bfloat16,
        obstacle(): obstacle() != "",
    }
    return [text for text, applies in checks.items() if applies]


@torch.compiler.assume_constant_result
def prepare() -> list[str]:
    """Compile the library if needed, and load it.

    Returns the reasons for a failure, or an empty list if the library is loaded. The result and the
    library are cached until the process ends.
    """
    return list(_prepare())


def is_ready(dtype: torch.dtype) -> bool:
    """Return whether the library can be loaded and can compute in a dtype on this CPU.

    dtype: float32 or bfloat16. Compiles the library first if needed.
    """
    return not prepare() and (dtype != torch.bfloat16 or has_bfloat16())


@functools.cache
def _prepare() -> list[str]:
    try:
        load()
    except (OSError, RuntimeError) as error:
        return [str(error)]
    return []


@functools.cache
def load() -> ctypes.CDLL:
    """Load and return the native library. Compiles it first if needed.

    Raises RuntimeError if the library cannot be compiled, and OSError if it cannot be loaded.
    """
    if reason := obstacle():
        raise RuntimeError(reason)
    with _built() as file:
        return ctypes.CDLL(str(file))


def as_float32(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Return {name: contiguous float32 tensor} for the tensors that are not None."""
    given = {name: x for name, x in tensors.items() if x is not None}
    return {name: x.detach().float().contiguous() for name, x in given.items()}


def call(name: str, numbers: ctypes.Structure, is_backward: bool) -> None:
    """Call a function of the library.

    name: an `extern "C"` function of library.cpp. numbers: the C structure that holds its
    arguments. is_backward: whether to run the backward pass.
    Raises RuntimeError if the function fails, for example because memory cannot be allocated.
    """
    function = getattr(load(), name)
    function.restype = ctypes.c_char_p
    if error := function(ctypes.byref(numbers), int(is_backward)):
        raise RuntimeError(f"the native library failed: {error.decode()}")


@contextmanager
def _built() -> Iterator[Path]:
    """Context manager that returns the path of the native library, compiling it first if needed.

    The library is in the cache. If the cache cannot be written, it is in a temporary folder, which
    is deleted at the end of the `with` block.
    """
    file = path()
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(file.parent):
                if not file.exists():  # another process may have compiled it
                    _compile(file)
    except OSError as error:
        log.warning(
            "the cache cannot be used, so the native library is compiled for this process only: %s",
            error,
        )
    else:
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="vil-native-") as folder:
        _compile(Path(folder, file.name))
        yield Path(folder, file.name)


def _compile(file: Path) -> None:
    """Compile the library to a temporary file, and rename it to `file`.

    Raises RuntimeError with the compiler's error message if compilation fails.
    """
    if not compiler():
        raise RuntimeError(obstacle())
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        _run_compiler([*_options(), str(SOURCES[-1]), *_openmp(), "-o", str(aside)])
        os.replace(aside, file)
    finally:
        with suppress(OSError):
            aside.unlink()


def _run_compiler(arguments: list[str]) -> None:
    """Run the C++ compiler. Raises RuntimeError with its error message if it fails."""
    name = " ".join(compiler())
    log.info("compiling the native library with %s, which takes about ten seconds", name)
    command = [*compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {name} cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the C++ compiler {name} was stopped after {MAX_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise RuntimeError(f"the C++ compiler {name} failed: {first.strip()}")


def _options() -> list[str]:
    """Return the compiler's options for this CPU."""
    bfloat16 = ["-mavx512bf16"] if has_bfloat16() else []
    tiles = AMX if bfloat16 and "amx_bf16" in _cpu_flags() and _compiles(AMX) else []
    return [*OPTIONS, *INSTRUCTIONS.get(capability(), []), *bfloat16, *tiles]


@functools.cache
def _compiles(options: tuple[str, ...]) -> bool:
    """Return whether the C++ compiler accepts these options. An old compiler may not."""
    command = [*compiler(), *options, "-E", "-x", "c++", os.devnull]
    try:
        return not subprocess.run(command, capture_output=True, timeout=MAX_SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _openmp() -> list[str]:
    """Return a list with the path of torch's OpenMP library, or an empty list if torch has none.

    The native library is linked to this file, so that torch and the native library use the same
    threads.
    """
    folder = Path(torch.__file__).parent
    places = (folder / "lib", folder.parent / "torch.libs")
    found = [str(file) for place in places for file in sorted(place.glob("libgomp*.so*"))]
    return found[:1]
