"""The compiled backend: threads, strides and head dims, and machines that cannot compile it."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.common.attention_cases import name_of
from tests.common.marks import cases
from tests.common.native_cache import needs_compiler
from vil.ops import BACKENDS, Case, LocalBias, Window, choose, local_attention, patterns
from vil.ops.call import to_numbers
from vil.ops.layout import Layout
from vil.ops.native import build, library
from vil.ops.patterns import parse_pattern
from vil.ops.testing import differences, errors, leaves_of, make_inputs, run

BIAS = dict(table_bias=True, global_bias=True)
CASES = [
    Case(Window((14, 9), 3), 1, 1, 16, 1, **BIAS),  # few heads: bands of rows
    Case(Window((13, 9), 3, -1), 1, 1, 5, 2, **BIAS, valid=True),  # bands of a cyclic grid
    Case(Window((15, 16), 14, 1), 1, 1, 8, 1, **BIAS),  # a chunk is several blocks, of two threads
    Case(Window((3, 40), 2), 2, 1, 65, 0),  # more channels than a block has columns
    Case(Window((7, 8), 3), 1, 3, 33, 17, global_bias=True),
    Case(Window((9, 9), 4, 1), 2, 2, 1, 0, valid=True),  # queries without keys
]
MIXED = parse_pattern("(axial | local:2) - local:1")
LAYOUT_CASES = [
    Case(Layout((14, 9), 3, MIXED), 1, 1, 16, 1, **BIAS),  # few heads: bands of rows
    Case(Layout((17, 18), 15, MIXED), 1, 2, 8, 1, **BIAS, valid=True),  # a chunk is several blocks
    Case(Layout((40, 9), 2, patterns.random(0.05)), 1, 1, 33, 17, global_bias=True),
    Case(Layout((12, 30), 4, MIXED, max_reach=(2, 3)), 2, 1, 5, 0, table_bias=True),
]
HALVES = [torch.bfloat16] if library.has_bfloat16() else []
DTYPES = [torch.float32, *HALVES]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", cases(CASES + LAYOUT_CASES, long=LAYOUT_CASES, text=name_of), ids=name_of
)
def test_it_equals_the_reference_on_any_number_of_threads(case, dtype, threads):
    case = replace(case, dtype=dtype)
    for key, (error, bound) in errors(case, ["native"]).items():
        assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES[:2], LAYOUT_CASES[0]], ids=name_of)
def test_results_repeat_bit_for_bit_on_any_number_of_threads(case, dtype):
    """Work is divided by its size only, so neither load nor threads change a sum."""
    case, found, before = replace(case, dtype=dtype, batch=3), [], torch.get_num_threads()
    inputs = make_inputs(case)
    for threads in (2, 2, 1, 3):
        torch.set_num_threads(threads)
        found.append(run(BACKENDS["native"].attend, case, inputs))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in other)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_may_have_any_strides(dtype):
    torch.manual_seed(0)
    packed = torch.randn(2, 35, 3, 2, 8, dtype=dtype)  # as a layer's qkv projection gives it
    window, table = Window((5, 7), 3), torch.randn(121, 2, dtype=dtype).T  # a parameter's view
    views = [x.transpose(1, 2) for x in packed.unbind(2)]
    channels_apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in views]
    results = []
    contiguous = [x.contiguous() for x in (*views, table)]
    for tensors in ((*views, table), contiguous, (*channels_apart, table)):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = local_attention(*leaves[:3], window, bias=LocalBias(leaves[3]), backend="native")
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])  # an expanded gradient
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [1, 0, -1])
def test_large_grids_equal_a_plain_backend(mask, dtype, threads):
    for window in (Window((56, 61), 7, mask), Window((65, 64), 8, mask)):
        case = Case(window, 1, 2, 48, 1, dtype, **BIAS)
        for key, (error, bound) in differences(case, "native", "chunk_autograd").items():
            assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"


@needs_compiler
def test_an_empty_batch_has_empty_outputs_and_no_bias_gradients(threads):
    case = replace(CASES[0], batch=0)
    inputs, numbers = make_inputs(case), to_numbers(case.window, case.num_global)
    leaves = leaves_of(inputs)
    BACKENDS["native"].resolve()  # declares the operator
    out, _ = torch.ops.vil.native(*leaves.values(), None, None, numbers, 1.0)
    assert out.shape == inputs.q.shape
    *grads, dtable, dto_global = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert [x.shape for x in grads] == [x.shape for x in (inputs.q, inputs.k, inputs.v)]
    assert not dtable.any()
    assert not dto_global.any()


@needs_compiler
def test_a_second_derivative_raises():
    q = make_inputs(CASES[0]).q.requires_grad_()
    out = local_attention(q, q, q, CASES[0].window, backend="native")
    with pytest.raises(RuntimeError, match="native has no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def attend_elsewhere(cache: Path, before: str = "", **environment: str) -> subprocess.Popen:
    """Start a process that attends with `native`, and prints the sum."""
    code = (
        "import torch, vil.ops as ops; from vil.ops.native import library;"
        "x = torch.ones(1, 1, 9, 4); window = ops.Window((3, 3), 2);" + before + ";"
        "print(ops.local_attention(x, x, x, window, backend='native').sum().item())"
    )
    environment = {**os.environ, "VIL_CACHE": str(cache), **environment}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)


# instead of the compiler's ten seconds: the file that a fixture has compiled
COPY = (
    "import shutil, time; library.build.compile_to = lambda file, instructions: "
    "(time.sleep(1), shutil.copy({file!r}, file), print('compiled'))"
)


@pytest.fixture
def copied():
    """Code that lets a process copy the library instead of compiling it."""
    assert not library.prepare()
    return COPY.format(file=str(library.path(library.instruction_sets()[0])))


def finish(process: subprocess.Popen) -> str:
    """Wait for a process that prints 36.0. Returns its other output."""
    out, error = process.communicate(timeout=120)
    assert out.endswith("36.0\n"), error
    return out.removesuffix("36.0\n") + error


@pytest.mark.long
def test_the_import_neither_compiles_nor_loads_it(tmp_path):
    code = (
        "import vil, vil.ops; from vil.ops import *; from vil.ops.native import library;"
        "explain(Case(Window((3, 3), 2), 1, 1, 4)); vil.get_model('vil_tiny');"
        "assert not library._load.cache_info().currsize"
    )
    environment = {**os.environ, "VIL_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def not_loaded(monkeypatch, tmp_path):
    """The library is looked for again, in an empty cache, and again after the test."""
    found = [each for each in vars(library).values() if hasattr(each, "cache_clear")]
    assert library._load in found
    for each in found:
        each.cache_clear()
    monkeypatch.setenv("VIL_CACHE", str(tmp_path))
    yield
    for each in found:
        each.cache_clear()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("VIL_NATIVE", "0", "VIL_NATIVE=0 turns it off"),
        ("CXX", "none-such", "no C++ compiler (none-such)"),
        ("CXX", "false", "false failed: status 1"),
        ("CXX", "env false", "env false failed: status 1"),
        ("CXX", "sh -c 'echo x.cpp: error: no room >&2; exit 1'", "x.cpp: error: no room"),
    ],
)
def test_where_it_cannot_run_other_backends_do(name, value, reason, not_loaded, monkeypatch):
    monkeypatch.setenv(name, value)
    window, x = Window((3, 3), 2), torch.ones(1, 1, 9, 4)
    assert choose(Case(window, 1, 1, 4)) == "masked"
    with pytest.raises(ValueError, match="backend 'native' cannot run this call: ") as error:
        local_attention(x, x, x, window, backend="native")
    assert reason in str(error.value)


@needs_compiler
@pytest.mark.long
def test_where_torch_uses_no_avx2_other_backends_do(tmp_path):
    asked = "print(ops.choose(ops.Case(window, 1, 1, 4)))"
    out, error = attend_elsewhere(tmp_path, asked, ATEN_CPU_CAPABILITY="default").communicate()
    assert out.strip() == "masked"
    assert "ValueError: backend 'native' cannot run this call: " in error
    assert "it needs Linux and a CPU with AVX2" in error


@needs_compiler
@pytest.mark.long
def test_a_compiler_that_fails_is_one_line(tmp_path):
    """And `vil info` names the backends that run instead."""
    words = ["info", "--config-file", "digits/vil_nano.yaml", "DEVICE", "cpu"]
    ended = subprocess.run(
        [sys.executable, "-m", "vil", *words], capture_output=True, text=True, check=True,
        env={**os.environ, "VIL_CACHE": str(tmp_path), "CXX": "false"},
    )  # fmt: skip
    (line,) = ended.stderr.splitlines()
    assert "false failed: status 1" in line
    assert "native library: not used: the C++ compiler" in ended.stdout
    assert "native in" not in ended.stdout


@pytest.mark.long
def test_a_wrong_value_of_the_variable_is_an_error(tmp_path):
    _, error = attend_elsewhere(tmp_path, "pass", VIL_NATIVE="maybe").communicate()
    assert "VIL_NATIVE must be 0 (no compiled code) or 1, not 'maybe'" in error


@needs_compiler
@pytest.mark.long
def test_a_compiler_that_cannot_be_run_is_named(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("not a program")
    compiler.chmod(0o755)
    _, error = attend_elsewhere(tmp_path / "cache", "pass", CXX=str(compiler)).communicate()
    assert f"the C++ compiler {compiler} cannot be run: " in error
    assert "the cache cannot be used" not in error


@needs_compiler
@pytest.mark.long
def test_processes_compile_once(copied, tmp_path):
    outputs = [finish(each) for each in [attend_elsewhere(tmp_path, copied) for _ in range(3)]]
    assert sum("compiled" in out for out in outputs) == 1


@needs_compiler
@pytest.mark.long
def test_the_lock_of_a_killed_process_is_free(copied, tmp_path):
    slow = copied.replace("time.sleep(1)", "print('locked', flush=True), time.sleep(99)")
    stuck = attend_elsewhere(tmp_path, slow)
    assert stuck.stdout.readline() == "locked\n"
    other = attend_elsewhere(tmp_path, f"{copied}; print('begun', flush=True)")
    assert other.stdout.readline() == "begun\n"
    stuck.kill()
    stuck.communicate()
    finish(other)


@needs_compiler
@pytest.mark.long
def test_a_damaged_file_is_compiled_again(copied, tmp_path):
    """As after a full disk: loading it would end the process with SIGBUS."""
    assert "compiled" in finish(attend_elsewhere(tmp_path, copied))
    (file,) = (tmp_path / "native").glob("*/*.so")
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1] + b"x", whole[:5000]):
        file.write_bytes(damaged)
        assert not build.is_complete(file)
    assert "compiled" in finish(attend_elsewhere(tmp_path, copied))
    assert file.read_bytes() == whole
    assert "compiled" not in finish(attend_elsewhere(tmp_path, copied))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_a_cache_that_cannot_be_written_is_a_warning(full, copied, tmp_path):
    (tmp_path / "file").write_text("in the way")
    if full:
        cache = tmp_path / "cache"
        copied += (
            ";import pathlib; copy = library.build.compile_to;"
            f"limit = pathlib.Path({str(cache)!r});"
            "library.build.compile_to = lambda file, name: copy(file, name) if limit not in "
            "file.parents else open('/dev/full', 'w', buffering=1).write('x\\n')"
        )
    else:
        cache = tmp_path / "file/below"
    said = finish(attend_elsewhere(cache, copied))
    assert "is compiled for this process only" in said
    assert ("No space left" in said) == full


@needs_compiler
@pytest.mark.long
def test_a_library_of_the_package_that_does_not_fit_is_compiled(copied, tmp_path):
    """As one that was built on a machine with a newer C library."""
    shipped = tmp_path / "built"
    shipped.mkdir()
    name = library.instruction_sets()[0]
    ours = f"{copied}; library.build.BUILT = __import__('pathlib').Path({str(shipped)!r})"
    shutil.copy(library.path(name), shipped)
    assert "compiled" not in finish(attend_elsewhere(tmp_path / "cache", ours))
    broken = b"not a library"
    (shipped / f"{name}.so").write_bytes(broken + build._digest(broken))
    assert "compiled" in finish(attend_elsewhere(tmp_path / "cache", ours))


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ((), ["amx", "avx512_bf16", "avx512", "avx2"]),
        (("amx_tile",), ["avx512_bf16", "avx512", "avx2"]),
        (("avx512f", "fma"), []),
    ],
    ids=str,
)
def test_only_instructions_of_this_cpu_are_used(missing, left, monkeypatch):
    flags = {flag for needed in build.INSTRUCTION_SETS.values() for flag in needed} - {*missing}
    monkeypatch.setattr(library, "search_file", lambda *args: " ".join(flags))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    library.instruction_sets.cache_clear()
    assert library.instruction_sets() == left
    monkeypatch.undo()
    library.instruction_sets.cache_clear()


@needs_compiler
@pytest.mark.long
def test_all_instruction_sets_are_compiled(tmp_path):
    assert build.build_all(tmp_path) == []
    assert all(build.is_complete(tmp_path / f"{name}.so") for name in build.INSTRUCTION_SETS)
    for name in library.instruction_sets():
        only = f"library.instruction_sets = lambda: [{name!r}]"
        shipped = f"library.build.BUILT = __import__('pathlib').Path({str(tmp_path)!r})"
        finish(attend_elsewhere(tmp_path / "cache", f"{only}; {shipped}"))
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_forked_process_computes():
    case = CASES[0]
    inputs = make_inputs(case)
    wanted = run(BACKENDS["native"].attend, case, inputs)["out"]
    child = os.fork()
    if not child:  # as a loader's worker
        torch.set_num_threads(1)
        found = run(BACKENDS["native"].attend, replace(case, needs_grad=False), inputs)["out"]
        os._exit(0 if torch.equal(found, wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
