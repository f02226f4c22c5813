"""Compile the C++ sources of this folder, for one of several instruction sets.

`library.py` compiles at first use, and setup.py when a wheel is built. This file therefore needs
nothing but the standard library.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).parent
MAIN = FOLDER / "library.cpp"
BUILT = FOLDER / "built"  # the libraries of a wheel
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
# {instruction set: flags of /proc/cpuinfo that it needs}, best first
INSTRUCTION_SETS = {
    "amx": (*AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*AVX512, "avx512_bf16"),
    "avx512": AVX512,
    "avx2": ("avx2", "fma"),
}
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-w")
COMPILERS = ("g++", "c++", "clang++")
MAX_SECONDS = 300  # of the compiler
MISSING = "no C++ compiler ({}) was found: install one, or set CXX to its path"
DIGEST_BYTES = hashlib.sha256().digest_size


class CompilerError(RuntimeError):
    """The compiler is missing, or it failed. The message is one line."""


def compiler() -> list[str]:
    """Return the path of the C++ compiler and its arguments, or an empty list if there is none.

    The compiler is $CXX, which may include arguments ("ccache g++"). If CXX is not set, it is the
    first of COMPILERS that is installed.
    """
    text = os.environ.get("CXX", "").strip()
    commands = [[text], text.split()] if text else [[name] for name in COMPILERS]
    for name, *arguments in commands:
        if program := shutil.which(name):
            return [program, *arguments]
    return []


def options(instructions: str) -> list[str]:
    """Return the compiler's options for a key of INSTRUCTION_SETS."""
    flags = (flag.replace("avx512_bf16", "avx512bf16") for flag in INSTRUCTION_SETS[instructions])
    return [*OPTIONS, *(f"-m{flag.replace('_', '-')}" for flag in flags)]


def source_digest() -> str:
    """Return a hash of the sources and of this file, which has the compiler's options."""
    sources = [*sorted(FOLDER.glob("*.h")), MAIN, Path(__file__)]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def compile_to(file: Path, instructions: str) -> None:
    """Compile the library to `file`, which appears complete or not at all. Its folder must exist.

    A hash of the library's bytes is appended, see `is_complete`.
    Raises CompilerError if compilation fails, and OSError if the file cannot be written.
    """
    command = compiler()
    if not command:
        raise CompilerError(MISSING.format(os.environ.get("CXX") or ", ".join(COMPILERS)))
    with tempfile.TemporaryDirectory(prefix="vil-native-") as folder:
        compiled = Path(folder, file.name)
        _run([*command, *options(instructions), str(MAIN), "-o", str(compiled)], " ".join(command))
        content = compiled.read_bytes()
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content + _digest(content))
        os.replace(aside, file)
    finally:
        with suppress(OSError):
            aside.unlink()


def _run(command: list[str], name: str) -> None:
    """Run a compiler. Raises CompilerError with its first error message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
    except OSError as error:
        raise CompilerError(f"the C++ compiler {name} cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise CompilerError(f"the C++ compiler {name} was stopped after {MAX_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise CompilerError(f"the C++ compiler {name} failed: {first.strip()}")


def _digest(library: bytes) -> bytes:
    return hashlib.sha256(library + source_digest().encode()).digest()


def is_complete(file: Path) -> bool:
    """Return whether a compiled library is unchanged and of these sources.

    Loading a truncated library, as after a full disk, would end the process with SIGBUS.
    """
    content = file.read_bytes()
    library, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return _digest(library) == digest


def build_all(folder: Path) -> list[str]:
    """Compile the library to `folder` for all instruction sets, several at a time.

    Returns a line for each instruction set that could not be compiled.
    """

    def build(instructions: str) -> str:
        try:
            compile_to(folder / f"{instructions}.so", instructions)
        except (CompilerError, OSError) as error:
            return f"{instructions}: {error}"
        return ""

    shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(filter(None, pool.map(build, INSTRUCTION_SETS)))
