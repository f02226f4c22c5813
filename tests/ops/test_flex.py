"""FlexAttention equals the reference, says what it cannot do, never computes all scores unseen.

What torch compiles for CPUs is the output alone. The log-sum-exp, and with it the way to a backward
pass, runs here on torch's own definition of FlexAttention, which the compiler "eager" leaves as it
is: masks, bias, layout and units are the same; the kernel is not. test_attention_on_gpu.py runs the
kernels.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_backends import EXACT

from tests.common.attention_cases import PAIRWISE, make_case, name_of
from tests.common.layout_cases import ALL_LAYOUTS, CALLS, LAYOUTS, layout_case
from tests.common.marks import cases
from vil.ops import BACKENDS, LocalBias, Window, local_attention, patterns
from vil.ops.backends import blocked, flex
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.testing import errors, make_inputs

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NONE, BOTH, TABLE, TO_GLOBAL = (False, False), (True, True), (True, False), (False, True)
GROUPS = {  # each is one shape for torch, compiled once
    "chunks": [
        make_case((0, 0), (1, 1), 3, 0, TABLE, True, F32),
        make_case((0, 0), (7, 8), 2, 3, BOTH, True, F32),
        make_case((0, 0), (5, 10), 3, 0, TABLE, True, F32),  # rows that see nothing
        make_case((0, 7), (1, 9), 3, 1, TO_GLOBAL, False, F32),
        make_case((-1, 0), (7, 9), 3, 1, BOTH, True, F32),  # wraps all around
        make_case((-1, 4), (3, 8), 2, 0, TABLE, False, F32),
    ],
    "fully visible": [
        make_case((0, 0), (7, 13), 4, 1, NONE, False, F32),
        make_case((0, 0), (16, 16), 4, 0, NONE, True, F32),
        make_case((-1, 2), (8, 5), 4, 16, NONE, False, F32),
    ],
    "exact": [
        make_case((1, 0), (7, 8), 2, 3, BOTH, True, BF16),
        make_case((1, 0), (1, 1), 1, 0, TABLE, False, BF16),
        make_case((1, 0), (5, 13), 4, 1, TO_GLOBAL, True, BF16),
    ],
    "larger chunks": [
        make_case((0, 0), (13, 9), 7, 1, BOTH, True, F16),
        make_case((0, 3), (15, 10), 7, 2, TABLE, False, F16),
    ],
    "layouts": [
        layout_case("(axial | local:2) - local:1", (5, 7), CALLS[1], head_dim=4),
        layout_case("random:0.1", (7, 4), CALLS[1], head_dim=4),
    ],
    "layouts per head": [
        layout_case("blocks per head", (5, 7), (4, 2, True, True, True, (4, 6), F32), head_dim=4),
        layout_case("mask per head", (7, 7), (4, 2, True, True, True, (4, 6), F32), head_dim=4),
    ],
    "layouts of full blocks": [
        layout_case("window:4", (5, 7), (4, 0, False, False, True, None, F32), head_dim=4),
        layout_case("window:4", (9, 13), (4, 0, False, False, True, None, F32), head_dim=4),
    ],
}
SMALL, SMALL_LAYOUT = GROUPS["chunks"][1], GROUPS["layouts"][0]
needs_compiler = pytest.mark.skipif(
    bool(lacking := flex.run_unsupported(replace(SMALL, needs_grad=False))),
    reason="; ".join(lacking),
)


@pytest.fixture(autouse=True)
def forget():
    yield
    flex.forget()


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(flex, "COMPILER", "eager")


def without_grad(cases):
    return [replace(case, needs_grad=False) for case in cases]


def check(case, name):
    assert BACKENDS[name].unsupported(case) == []
    for what, (error, bound) in errors(case, [name]).items():
        assert error <= bound, f"{what} is off by {error:.2e} (bound {bound:.2e}), {name_of(case)}"


def call_of(case, inputs):
    bias = LocalBias(inputs.table, inputs.to_global)
    call = Call(inputs.q, inputs.k, inputs.v, case.window, case.num_global, bias, inputs.valid_hw)
    return call._replace(scale=case.head_dim**-0.5)


def check_lse(case):
    """Compare with that of blocked in float64."""
    inputs = make_inputs(case)
    found = [
        flex.forward(call_of(case, inputs))[1],
        blocked.forward(call_of(case, inputs.to(torch.float64)))[1],
    ]
    assert found[0].dtype == F32
    # a few ulps of scores of size 4 in the case's dtype
    atol = 16 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(found[0], found[1].float(), atol=atol, rtol=atol)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_output_equals_the_reference(group):
    for case in without_grad(GROUPS[group]):
        check(case, "flex")


@pytest.mark.parametrize("group", cases(GROUPS, long=list(GROUPS)[1::2]))
def test_lse_and_gradients_of_the_joined_pair(group, eager):
    for case in GROUPS[group]:
        check(case, "flex+blocked")
        check_lse(case)


@pytest.mark.parametrize(
    "case", cases(LAYOUTS, long=LAYOUTS[::2], text=name_of, slow=LAYOUTS[1::2]), ids=name_of
)
def test_layouts_equal_the_reference(case, eager):
    check(case, "flex+blocked")
    check_lse(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flex", "flex+blocked"])
def test_every_pair_of_values_and_every_layout(name, monkeypatch):
    is_pair, tested = name != "flex", 0
    if is_pair:
        monkeypatch.setattr(flex, "COMPILER", "eager")
    for case in PAIRWISE + EXACT + (ALL_LAYOUTS if is_pair else LAYOUTS):
        case = replace(case, needs_grad=is_pair)
        if any("the limit of" in reason for reason in BACKENDS[name].unsupported(case)):
            flex.forget()
        if BACKENDS[name].unsupported(case):
            continue
        check(case, name)
        tested += 1
        if is_pair:
            check_lse(case)
    assert tested > 100


@pytest.mark.parametrize("case", [SMALL, SMALL_LAYOUT], ids=["window", "layout"])
def test_any_strides_work_and_inputs_do_not_change(case, eager):
    case = without_grad([case])[0]
    call = call_of(case, make_inputs(case))
    q, k, v = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in call[:3])
    tensors = [q, k, v, *call.bias]
    kept = [x.clone() for x in tensors]
    out, lse = flex.forward(call._replace(q=q, k=k, v=v))
    again = flex.forward(call)
    assert out.stride() == torch.empty_like(q).stride()  # as the fake implementation returns
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept))


def test_a_shape_above_the_limit_is_refused_and_known_shapes_run(eager, monkeypatch):
    monkeypatch.setattr(flex, "MAX_SHAPES", 1)
    known, new = SMALL, replace(SMALL, heads=3)
    check(known, "flex+blocked")
    assert flex.unsupported(known) == []
    assert flex.unsupported(replace(known, window=Window((5, 5), 3))) == []
    assert "the limit of 1 compiled shapes is reached" in flex.unsupported(new)[0]
    flex.forget()
    assert flex.unsupported(new) == []


def test_it_raises_instead_of_storing_all_scores(eager):
    """Where torch.compile is disabled, FlexAttention would only warn."""
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="disabled"),
    ):
        check_lse(SMALL)


def test_inside_a_compiled_program(eager):
    case = without_grad([SMALL])[0]
    inputs = make_inputs(case)

    def program(q, k, v, table, to_global):
        assert flex.run_unsupported(case) == []
        bias = LocalBias(table, to_global)
        return flex.run(Call(q.sin(), k, v, case.window, 3, bias, inputs.valid_hw)) + 1

    tensors = inputs.q, inputs.k, inputs.v, inputs.table, inputs.to_global
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), program(*tensors))


def test_layouts_inside_a_compiled_program(eager):
    """The pairs compute them. `flex` says that it does not."""
    case = SMALL_LAYOUT
    inputs = make_inputs(case)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    layout = case.window

    def program(backend, q, k, v):
        return local_attention(q.sin(), k, v, layout, num_global=2, backend=backend) + 1

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    found, wanted = (attend("flex+blocked", q, k, v) for attend in (compiled, program))
    torch.testing.assert_close(found, wanted)
    first, second = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, wanted))
    torch.testing.assert_close(first, second)
    with torch.no_grad(), pytest.raises(Exception, match="it computes windows only"):
        compiled("flex", q, k, v)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dropout=True), "dropout"),
        (dict(window=Window((3, 3), 3, -1)), "keys repeat"),
        (dict(dtype=torch.float64), "float64"),
        (dict(window=Window((460, 460), 10)), "2116 chunks are more than 2048"),
        (dict(window=Layout((460, 460), 10, patterns.local(2))), "2116 chunks are more than 2048"),
        (dict(device="meta"), "device meta"),
        (dict(device="cuda"), "4 channels per head"),
        (dict(device="cuda", batch=9000, heads=8), "72000 images times heads"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_reasons(change, reason):
    case = replace(SMALL, needs_grad=False, **change)
    for unsupported in (flex.unsupported, flex.run_unsupported):
        assert any(reason in sentence for sentence in unsupported(case))


def test_deterministic_algorithms_refuse_the_gradient_of_the_bias():
    case = replace(SMALL, device="cuda", head_dim=16)
    assert flex.run_unsupported(case) == []
    torch.use_deterministic_algorithms(True)
    try:
        assert "nondeterministic order" in flex.run_unsupported(case)[0]
        assert flex.run_unsupported(replace(case, needs_grad=False)) == []
        assert flex.unsupported(case) == []
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
def test_a_machine_without_a_compiler_is_a_reason():
    code = (
        "import torch; from vil.ops import Case, Window; from vil.ops.backends import flex;"
        "print(flex.run_unsupported(Case(Window((3, 3), 2), 1, 1, 4, needs_grad=False)))"
    )
    environment = {"CXX": "no-such-compiler", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "no C++ compiler" in found.stdout
