"""The fused Triton kernels equal the reference, and compile for a GPU without having one.

Triton decides at import whether it compiles or interprets kernels. So each runs in a subprocess,
and this process does not import Triton.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.common.attention_cases import PAIRWISE, make_case, name_of
from tests.common.layout_cases import ALL_LAYOUTS, CALLS, LAYOUTS, layout_case
from tests.common.marks import cases
from tests.common.triton_runs import passes, process
from vil.layers.attention import TrainStep, set_progress
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.ops import Case, LocalBias, Window, patterns
from vil.ops.backends.triton import fused, gradients
from vil.ops.backends.triton.plan import make_plan
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.testing import errors, make_inputs

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NONE, TABLE, BOTH = (False, False), (True, False), (True, True)
SHARED_BYTES = 227 * 1024  # of a block on sm_90


def case_of(head_dim: int, *row) -> Case:
    return replace(make_case(*row), head_dim=head_dim)


CASES = [
    case_of(16, (1, 0), (1, 1), 2, 0, TABLE, False, SINGLE),
    case_of(64, (-1, 0), (1, 1), 8, 1, BOTH, False, SINGLE),
    case_of(16, (1, 0), (7, 8), 3, 1, BOTH, True, SINGLE),
    case_of(48, (1, 0), (5, 6), 2, 0, NONE, False, HALF),
    case_of(16, (1, 0), (9, 10), 8, 0, TABLE, True, BRAIN),  # blocks smaller than a chunk
    case_of(16, (0, 0), (7, 8), 3, 3, BOTH, True, SINGLE),
    case_of(64, (0, 0), (9, 6), 7, 1, NONE, True, BRAIN),
    case_of(16, (0, 0), (3, 2), 7, 0, TABLE, False, HALF),  # the window is larger than the grid
    case_of(20, (-1, 0), (5, 9), 3, 1, BOTH, True, BRAIN),  # cyclic, two chunks: keys repeat
    case_of(16, (-1, 0), (7, 8), 2, 0, (False, False), True, HALF),
    case_of(16, (-1, 0), (3, 13), 8, 3, BOTH, False, SINGLE),
    case_of(16, (0, -1), (7, 8), 3, 1, BOTH, True, BRAIN),
    case_of(16, (-1, -1), (7, 5), 2, 0, TABLE, True, SINGLE),
    case_of(16, (0, 1), (7, 8), 3, 3, (False, True), True, SINGLE),
    case_of(48, (0, 5), (5, 7), 2, 1, TABLE, False, HALF),
    case_of(16, (0, 7), (9, 11), 8, 0, TABLE, True, BRAIN),
    case_of(16, (-1, 3), (5, 8), 3, 1, BOTH, False, SINGLE),
    case_of(16, (-1, 8), (8, 5), 3, 0, TABLE, True, HALF),
    Case(Window((7, 8), 3, 0, ((0, 0), (-1, 1), (1, 0))), 2, 2, 16, 1, SINGLE, "cpu", True, True),
    Case(Window((5, 7), 2, -1, ((1, 1), (0, 0), (0, -1))), 2, 1, 16, 0, SINGLE, "cpu", True),
]
# two images of two heads in the first, then fewer: interpreted programs are slow
CASES[4:] = [replace(c, batch=1 + n % 2, heads=2 - n % 2) for n, c in enumerate(CASES[4:])]
SIZES = [  # head dims with different padding, small and large windows
    replace(
        case_of(dim, (kind, 0), grid, size, 1, BOTH, True, dtype),
        batch=1 + (size < 12),
        heads=1 + (size < 12),
    )
    for dim, size, grid, kind, dtype in [
        (16, 32, (33, 5), 1, BRAIN), (20, 31, (3, 35), 0, HALF), (16, 16, (17, 20), -1, BRAIN),
        (17, 15, (16, 19), 0, HALF), (24, 12, (13, 15), 1, BRAIN), (31, 9, (10, 11), 0, SINGLE),
        (32, 8, (9, 15), -1, HALF), (33, 7, (8, 13), 1, SINGLE), (48, 6, (7, 11), 0, BRAIN),
        (64, 5, (9, 6), 1, HALF), (65, 4, (5, 7), -1, SINGLE), (80, 7, (8, 13), 0, BRAIN),
        (96, 3, (4, 5), 1, SINGLE), (100, 8, (9, 15), 0, SINGLE), (127, 2, (3, 5), 1, BRAIN),
        (128, 8, (9, 15), -1, SINGLE), (128, 7, (8, 13), 1, HALF),
    ]
]  # fmt: skip
LAYOUTS = [  # some with padded channels
    replace(case, head_dim=(16, 16, 20)[at % 3], batch=1 + at % 2)
    for at, case in enumerate(LAYOUTS)
]
LARGE_LAYOUTS = [case for case in LAYOUTS if case.window.length > 35]
LAYOUTS = [case for case in LAYOUTS if case not in LARGE_LAYOUTS]
PER_HEAD = replace(layout_case("mask per head", (4, 3), CALLS[0]), batch=1)
QUICK = [case for case in CASES if case.window.size == 2][:2]
QUICK += [replace(layout_case("(axial | local:2) - local:1", (3, 5), CALLS[1]), batch=1)]
OTHERS = [case for case in CASES + LAYOUTS if case not in QUICK]
LONG = [PER_HEAD, *OTHERS[::4]]
TABLE_OF_PAIRS = [
    replace(case, head_dim=16, dtype=HALF if case.dtype == torch.float64 else case.dtype)
    for case in PAIRWISE
]


@pytest.fixture(scope="module")
def interpreter():
    """Run functions of this file in a process that interprets kernels."""
    with process(TRITON_INTERPRET="1") as pool:
        pool.submit(prepare_interpreter).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Run functions of this file in a process that compiles kernels without running them."""
    cache = str(tmp_path_factory.mktemp("triton"))
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache) as pool:
        pool.submit(prepare_compiler).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def prepare_interpreter() -> None:
    from triton.runtime import interpreter

    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN: all must be written
    assert torch.empty(3).isnan().all()
    # overflow checks of additions take three quarters of the time
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def measure(case: Case) -> dict[str, tuple[float, float]]:
    assert fused.unsupported(case) == []
    return errors(case, ["triton"])


def check(found: dict[str, tuple[float, float]]) -> None:
    assert found
    for what, (error, bound) in found.items():
        assert error <= bound, f"{what} is off by {error:.2e} (bound {bound:.2e})"


SLOW = [case for number, case in enumerate(OTHERS) if number % 4]
SLOW += SIZES + TABLE_OF_PAIRS + LARGE_LAYOUTS


def id_of(case: Case) -> str:
    return f"d{case.head_dim}-{name_of(case)}"


@needs_triton
@pytest.mark.parametrize("case", cases(QUICK + LONG + SLOW, LONG, name_of, SLOW), ids=id_of)
def test_the_kernels_equal_the_reference(interpreter, case):
    check(interpreter(measure, case))


def both_passes(case: Case, rearranged: bool) -> list[torch.Tensor]:
    """All results; rearranged: of tensors with other strides."""
    inputs = make_inputs(case)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.cotangent
    dout = dout[:, :, :1].expand_as(dout)
    if rearranged:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as split from (B, L, N*D)
        k, v = torch.cat([k, v], dim=-1).chunk(2, dim=-1)
        v = v.mT.contiguous().mT  # channels with a large stride
        assert not any(x.is_contiguous() for x in (q, k, v, dout))
    else:
        dout = dout.contiguous()
    bias = LocalBias(inputs.table, inputs.to_global)
    return passes(Call(q, k, v, case.window, case.num_global, bias, inputs.valid_hw, 0.3), dout)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize(
    "window", [Window((4, 3), 2, 1), Layout((4, 3), 2, patterns.axial())], ids=["window", "layout"]
)
def test_strides_change_nothing(interpreter, window):
    case = replace(CASES[2], window=window)
    for a, b in zip(*(interpreter(both_passes, case, other) for other in (False, True))):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def rows_without_keys(window: Window | Layout) -> list[torch.Tensor]:
    q, k, v, dout = torch.randn(4, 1, 1, 36, 16).unbind()
    return passes(Call(q, k, v, window, valid_hw=torch.tensor([[1, 1]])), dout)[:5]


@needs_triton
@pytest.mark.parametrize(
    "window", [Window((6, 6), 2), Layout((6, 6), 3, patterns.local(1))], ids=["window", "layout"]
)
def test_a_row_without_keys_gives_zero_and_no_gradient(interpreter, window):
    out, lse, dq, dk, dv = interpreter(rows_without_keys, window)
    assert lse[0, 0, -1] == -torch.inf
    assert out[0, 0, -1].eq(0).all()
    assert dq[0, 0, -1].eq(0).all()
    assert out[0, 0, 0].ne(0).any()
    assert dv[0, 0, 0].ne(0).any()
    assert all(grad[0, 0, 1:].eq(0).all() for grad in (dk, dv))


def gradient_in_groups(case: Case) -> list[torch.Tensor]:
    """The gradient of the bias table, of all displacements of chunks at once and one by one."""
    found = []
    for share in (gradients.SUMS_SHARE, 1 << 30):  # no room for more than one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "SUMS_SHARE", share)
            found.append(both_passes(case, rearranged=False)[5])
    return found


@needs_triton
@pytest.mark.long
def test_the_gradient_of_the_table_is_summed_in_groups_that_fit(interpreter):
    case = replace(layout_case("axial", (5, 4), CALLS[0]), batch=1, heads=1)
    first, second = interpreter(gradient_in_groups, case)
    assert first.ne(0).any()
    torch.testing.assert_close(first, second)


def bias_of_other_type() -> list[torch.dtype]:
    case = replace(case_of(16, (0, -1), (3, 2), 2, 1, BOTH, True, BRAIN), batch=1, heads=1)
    inputs = make_inputs(case)
    bias = LocalBias(inputs.table.float(), inputs.to_global.double())
    call = Call(inputs.q, inputs.k, inputs.v, case.window, case.num_global, bias, inputs.valid_hw)
    return [x.dtype for x in passes(call, inputs.cotangent)]


@needs_triton
def test_gradients_have_the_dtypes_of_their_inputs(interpreter):
    wanted = [BRAIN, SINGLE, BRAIN, BRAIN, BRAIN, SINGLE, torch.float64]
    assert interpreter(bias_of_other_type) == wanted


def train_compiled() -> tuple[int, list[torch.Tensor]]:
    """Gradients of a training step of random shift with and without torch.compile, and the number
    of graphs."""
    from torch._dynamo.utils import counters

    counters.clear()
    arch = "l1,h1,d16,n1,s1,g1,p4,f4,a0_l2,h2,d32,n1,s1,g1,p2,f3,a1"
    options = {"longformer": {"mode": 1, "backend": "triton"}}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MsViT(parse_arch(arch), num_classes=3, img_size=24, attention_args=options))
    torch.use_deterministic_algorithms(False)  # else Inductor's tests of tensors fail
    models[1].compile(backend="aot_eager", fullgraph=True)
    for step in range(2):
        for model in models:
            set_progress(model, TrainStep(0, step, 0, 1, 2))
            model(torch.ones(1, 3, 24, 24)).square().sum().backward()
    torch.use_deterministic_algorithms(True)
    grads = [[p.grad for p in model.parameters()] for model in models]
    return counters["stats"]["unique_graphs"], [*zip(*grads)]


@needs_triton
@pytest.mark.long
def test_a_compiled_training_step_equals_an_eager_one(interpreter):
    graphs, grads = interpreter(train_compiled)
    assert graphs == 1
    assert sum(bool(eager.ne(0).any()) for eager, _ in grads) > len(grads) / 2
    for eager, compiled in grads:
        torch.testing.assert_close(compiled, eager)


def prepare_compiler() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        """The part of a driver that compiling needs."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    launch = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        kernel = launch(self, *args, warmup=True, **kwargs)
        COMPILED[self.fn.__name__] = len(kernel.asm["cubin"]), kernel.metadata.shared

    driver.set_active(Hopper())
    JITFunction.run = compile_only


COMPILED: dict[str, tuple[int, int]] = {}


def compile_both(case: Case) -> dict[str, tuple[int, int]]:
    """{kernel: bytes of the binary, of shared memory} of the launches of a case."""
    COMPILED.clear()
    both_passes(case, rearranged=False)
    return dict(COMPILED)


def check_compiled(case: Case, found: dict[str, tuple[int, int]]) -> None:
    wanted = {"forward_kernel", "query_kernel", "key_kernel"}
    wanted |= {"global_kernel"} if case.num_global else set()
    wanted |= {"tile_kernel", "bias_kernel"} if case.table_bias else set()
    masked = make_plan(case.window, case.num_global, case.table_bias).has_mask
    wanted |= {"expand_kernel"} if case.table_bias or masked else set()
    assert found.keys() == wanted
    for name, (size, shared) in found.items():
        assert size > 0, name
        assert shared <= SHARED_BYTES, f"{name} takes {shared} bytes of shared memory"


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "dim", "num_global", "bias", "dtype"),
    [("", 128, 1, BOTH, SINGLE), ("local:3", 48, 0, TABLE, HALF)],  # the most shared memory first
    ids=["window", "layout"],
)
def test_the_kernels_compile_for_a_gpu(compiler, text, dim, num_global, bias, dtype):
    window = Layout((21, 21), 7, patterns.parse_pattern(text)) if text else Window((20, 20), 7, 1)
    case = Case(window, 2, 2, dim, num_global, dtype, "cpu", *bias, True)
    check_compiled(case, compiler(compile_both, case))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("dim", [16, 20, 32, 48, 64, 96, 128])
def test_all_kernels_compile_for_a_gpu(compiler, dim, dtype):
    for size, kind, num_global, bias, valid in [
        (2, 1, 3, BOTH, True),
        (5, -1, 40, TABLE, False),
        (8, 0, 0, NONE, False),
        (16, 1, 1, BOTH, True),
    ]:
        case = case_of(dim, (kind, 0), (20, 20), size, num_global, bias, valid, dtype)
        check_compiled(case, compiler(compile_both, case))
        layout = Layout((20, 20), size, patterns.parse_pattern("local:3 | random:0.1"))
        case = replace(case, window=layout)
        check_compiled(case, compiler(compile_both, case))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + SIZES + ALL_LAYOUTS[::6], ids=id_of)
def test_the_kernels_equal_the_reference_on_a_gpu(case):
    check(measure(replace(case, device="cuda")))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(
    "window",
    [Window((56, 56), 8), Layout((56, 56), 8, patterns.parse_pattern("axial | random:0.05"))],
    ids=["window", "layout"],
)
def test_a_repeated_run_gives_the_same_bits(window):
    case = Case(window, 8, 6, 64, 1, BRAIN, "cuda", True, True)
    runs = [both_passes(case, rearranged=False) for _ in range(5)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


PLAIN = Case(Window((8, 8), 4), 1, 1, 32, device="cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "it needs a CUDA device, not cpu"),
        ({"dtype": torch.float64}, "16 or 32 bits, not in float64"),
        ({"head_dim": 8}, "16 to 128 channels"),
        ({"head_dim": 129}, "16 to 128 channels"),
        ({"window": Window((8, 8), 1)}, "the window size must be 2 to 32, not 1"),
        ({"window": Window((8, 8), 33)}, "the window size must be 2 to 32, not 33"),
        (
            {"window": Layout((8, 8), 1, patterns.axial())},
            "the chunk size must be 2 to 32, not 1",
        ),
        ({"num_global": 65}, "65 global tokens are more than 64"),
        ({"dropout": True}, "dropout"),
    ],
    ids=str,
)
def test_reasons(monkeypatch, change, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert set(fused.unsupported(PLAIN)) <= {"triton is not installed"}
    assert any(reason in said for said in fused.unsupported(replace(PLAIN, **change)))


@pytest.mark.long
def test_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from vil.ops import Case, Window\n"
        "from vil.ops.backends.triton.fused import unsupported\n"
        "print(unsupported(Case(Window((8, 8), 4), 1, 1, 32, device='cuda')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.stdout.strip() == "['triton is not installed']", run.stderr
