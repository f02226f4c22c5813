"""Every backend equals the reference, in output and all gradients, or says why it cannot run."""

import itertools
from collections.abc import Iterable
from importlib.util import find_spec

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from tests.common.attention_cases import (
    FACTORS,
    PAIRWISE,
    make_case,
    name_of,
)
from tests.common.backends import restored_backends
from vil.ops import (
    BACKENDS,
    Case,
    Layout,
    LocalBias,
    Window,
    choose,
    explain,
    local_attention,
    reference,
)
from vil.ops.backends.masked import MAX_MASKED_LENGTH
from vil.ops.dispatch import PREFERENCE
from vil.ops.native import library
from vil.ops.patterns import axial
from vil.ops.testing import errors, make_inputs

HALVES = {torch.bfloat16} if library.has_bfloat16() else set()


def compiled_accepts(case: Case) -> bool:
    """Whether `native` must accept a case: nothing, without a compiler."""
    return not library.obstacle() and case.dtype in {torch.float32, *HALVES} and not case.dropout


MUST_ACCEPT = {  # the cases that each backend must accept
    "masked": lambda case: not case.window.repeats() and case.window.length <= MAX_MASKED_LENGTH,
    "chunk_autograd": lambda case: True,
    "chunk_handgrad": lambda case: True,
    "gathered": lambda case: True,
    "blocked": lambda case: not case.dropout,
    "native": compiled_accepts,
    "triton": lambda case: False,  # needs a GPU or Triton's interpreter, see test_triton
    "unfold_tensor": lambda case: case.window.mask == 1,
    "unfold_nnf": lambda case: case.window.mask == 1,
}
LARGE = [Case(Window((91, 91), 7), 1, 1, 8), Case(Window((40, 300), 7, -1), 1, 1, 8, dropout=True)]
EXACT = [  # the only mask of some backends, which few rows of the table have
    make_case((1, 0), grid, window, num_global, bias, valid, dtype)
    for grid, window, num_global, bias, valid, dtype in [
        ((1, 1), 1, 0, (True, False), False, torch.float32),
        ((7, 8), 1, 1, (True, True), True, torch.float16),
        ((7, 8), 2, 0, (False, False), True, torch.float32),
        ((5, 13), 4, 3, (True, True), True, torch.bfloat16),
        ((13, 5), 4, 1, (True, False), False, torch.float16),
        ((1, 9), 15, 2, (False, True), True, torch.float64),
        ((14, 14), 7, 1, (True, True), True, torch.float64),
    ]
]
RECOMPUTING = ("blocked", "native")
KINDS = [  # every backend with each mask, exact (1) and chunks (0), that it supports
    (name, exact)
    for name in BACKENDS
    for exact in (1, 0)
    if MUST_ACCEPT[name](Case(Window((3, 3), 3, exact), 1, 1, 4))
]


@pytest.mark.defect("B14")
@pytest.mark.trust(10)
@pytest.mark.parametrize("case", PAIRWISE + EXACT, ids=name_of)
def test_backends_equal_the_reference(case):
    check(case)


@pytest.mark.long
@pytest.mark.smoke
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.tuples(
        *(
            st.sampled_from(values)
            for name, values in FACTORS.items()
            if name not in ("grid", "window")
        )
    ),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
    st.integers(1, 13),
    st.integers(0, 999),
)
def test_backends_equal_the_reference_on_random_cases(rest, grid, window, seed):
    check(make_case(rest[0], grid, window, *rest[1:]), seed)


def check(case: Case, seed: int = 0, names: Iterable[str] = BACKENDS) -> None:
    able = [name for name in names if MUST_ACCEPT[name](case)]
    for what, (error, bound) in errors(case, able, seed).items():
        assert error <= bound, f"{what} is off by {error:.2e} (bound {bound:.2e}), {name_of(case)}"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_accepts_what_it_must_and_gives_reasons_against_the_rest(name):
    for case in PAIRWISE + EXACT + LARGE:
        reasons = BACKENDS[name].unsupported(case)
        assert (reasons == []) == MUST_ACCEPT[name](case), (name_of(case), reasons)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in BACKENDS
        for case in PAIRWISE[::9] + EXACT[3:4]
        if MUST_ACCEPT[name](case)
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_inputs_do_not_change(name, case):
    inputs = make_inputs(case)
    kept = {key: tensor.clone() for key, tensor in vars(inputs).items() if tensor is not None}
    local_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        case.window,
        num_global=case.num_global,
        valid_hw=inputs.valid_hw,
        bias=LocalBias(inputs.table, inputs.to_global),
        backend=name,
    )
    assert all(torch.equal(tensor, getattr(inputs, key)) for key, tensor in kept.items())


@pytest.mark.parametrize(("name", "exact"), KINDS)
def test_a_query_without_keys_gives_zero_and_finite_gradients(name, exact):
    window, valid = Window((6, 6), 2, exact), torch.tensor([[1, 1]])
    q, k, v = (torch.randn(1, 1, 36, 4, requires_grad=True) for _ in range(3))
    out = local_attention(q, k, v, window, valid_hw=valid, backend=name)
    out.sum().backward()
    assert out[0, 0, -1].eq(0).all()
    assert out[0, 0, 0].ne(0).any()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


def test_no_images_give_gradients_of_zero():
    q, k, v = (torch.randn(0, 1, 36, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 49, requires_grad=True)
    out = local_attention(q, k, v, Window((6, 6), 2), bias=LocalBias(table))
    assert out.shape == (0, 1, 36, 4)
    out.sum().backward()
    assert not table.grad.any()
    assert k.grad.shape == k.shape


@pytest.mark.parametrize(("name", "exact"), KINDS)
def test_a_large_bias_leaves_gradients_finite(name, exact):
    """5 x 7 tokens in chunks of 3 have queries in the padding, whose scores are not normalized."""
    window, table = Window((5, 7), 3, exact), torch.full((2, 121), 200.0, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 35, 4, requires_grad=True) for _ in range(3))
    out = local_attention(q, k, v, window, bias=LocalBias(table), backend=name)
    out.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v, table))


@pytest.mark.parametrize(("name", "exact"), [kind for kind in KINDS if kind[0] not in RECOMPUTING])
def test_dropout_keeps_the_mean_and_drops_keys(name, exact):
    torch.manual_seed(0)
    window = Window((3, 3), 3, exact)
    q, k = torch.zeros(400, 1, 9, 1), torch.zeros(400, 1, 10, 1)
    v = torch.ones(400, 1, 10, 1)
    outs = local_attention(q, k, v, window, num_global=1, dropout_p=0.5, backend=name)
    assert outs.mean().item() == pytest.approx(1.0, abs=0.03)
    assert (outs * 5).round().sub(
        outs * 5
    ).abs().max() < 1e-5  # ten keys of weight 1/10, doubled where kept
    assert outs.std() > 0.1


@pytest.mark.defect("B16")
@pytest.mark.parametrize(("name", "exact"), KINDS)
def test_autocast_does_not_change_the_computation(name, exact):
    window = Window((3, 4), 2, exact)
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    plain = local_attention(q, k, v, window, backend=name)
    with torch.autocast("cpu", torch.bfloat16):
        cast = local_attention(q, k, v, window, backend=name)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize(
    ("name", "exact"),
    [kind for kind in KINDS if kind[0] not in ("chunk_handgrad", "gathered", *RECOMPUTING)],
)
def test_second_derivatives(name, exact):
    window = Window((2, 3), 2, exact)
    q, k, v = (torch.randn(1, 1, 6, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 49, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda q, k, v, table: local_attention(
            q, k, v, window, bias=LocalBias(table), backend=name
        ),
        (q, k, v, table),
        fast_mode=True,
    )


@pytest.mark.defect("B16")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chunk_handgrad", "no second derivative"),
        ("blocked", "no second derivative"),
        ("masked", "derivative .* is not implemented"),  # torch's own, of fused attention
        ("gathered", "derivative .* is not implemented"),
    ],
)
def test_a_missing_second_derivative_raises(name, message):
    q, k, v = (torch.randn(1, 1, 6, 2, requires_grad=True) for _ in range(3))
    out = local_attention(q, k, v, Window((2, 3), 3), backend=name)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum().backward()


def test_the_reference_is_plain_attention_where_the_window_covers_the_grid():
    q, k, v = (torch.randn(2, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    local = reference.attend(q, k, v, Window((3, 4), 4))
    assert torch.allclose(local, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_repeated_key_counts_each_time():
    """On a cyclic grid of one chunk all nine offsets lead to the same chunk, as one offset does."""
    q, k, v = (torch.randn(1, 1, 9, 4, dtype=torch.float64) for _ in range(3))
    once, nine = Window.from_mode((3, 3), 3, -1, -1), Window((3, 3), 3, -1)
    assert nine.repeats()
    assert not once.repeats()
    table = torch.zeros(1, 121, dtype=torch.float64)
    table[0, :60] = 1.0  # the offsets differ in bias only
    plain, biased = (reference.attend(q, k, v, nine, bias=LocalBias(t)) for t in (None, table))
    assert torch.allclose(plain, reference.attend(q, k, v, once))
    assert not torch.allclose(plain, biased)


@pytest.mark.parametrize("names", PREFERENCE.values(), ids=list(PREFERENCE))
def test_a_preferred_backend_can_always_run(names):
    assert set(names) <= set(BACKENDS)
    assert all(MUST_ACCEPT[names[-1]](case) for case in PAIRWISE + EXACT + LARGE)


@pytest.mark.parametrize(
    ("window", "options", "name"),
    [
        (Window((56, 56), 7), {}, "blocked"),
        (Window((56, 56), 7), {"dropout": True}, "chunk_handgrad"),
        (Window((14, 14), 7), {}, "masked"),  # two chunks a side: all see all
        (Window((12, 12), 3), {}, "masked"),  # so small that one product takes less time than cuts
        (Window((18, 18), 3), {}, "blocked"),
        (Window.from_mode((14, 14), 7, 0, 3), {}, "blocked"),  # with one neighbor only
        (Window((28, 28), 7), {}, "blocked"),
        (Window((14, 14), 7, -1), {}, "blocked"),  # keys repeat, which a mask cannot represent
        (Window((36, 36), 20), {}, "blocked"),  # too many scores for a batch
    ],
    ids=str,
)
def test_selection_on_a_cpu_without_native(window, options, name, without_native):
    assert choose(Case(window, 8, 3, 32, **options)) == name


@pytest.mark.parametrize(
    ("window", "options", "name"),
    [
        (Window((56, 56), 7), {}, "triton"),
        (Window((56, 56), 7), {"table_bias": True, "valid": True}, "triton"),
        (Layout((56, 56), 8, axial()), {}, "triton"),
        (Window((14, 14), 7), {}, "masked"),  # all tokens see all: torch's attention, no mask
        (Window((14, 14), 7), {"table_bias": True}, "triton"),
        (Window((14, 14), 7), {"valid": True}, "triton"),
        (Window((56, 56), 7), {"dropout": True}, "chunk_handgrad"),
        (Window((56, 56), 7), {"dtype": torch.float64}, "chunk_handgrad"),
        (Layout((56, 56), 8, axial()), {"dropout": True}, "masked"),
    ],
    ids=str,
)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_selection_on_a_gpu(window, options, name):
    assert choose(Case(window, 8, 3, 32, 1, device="cuda", **options)) == name


def test_attends_all():
    """Every grid with every kind, and each of them with every size."""
    grids = [(1, 1), (1, 9), (3, 3), (5, 6), (6, 6), (9, 4)]
    kinds = [(1, 0), (0, 0), (-1, 0), (0, -1), (0, 2), (-1, 3)]
    sizes, verdicts = [2, 3, 5, 8], set()
    for (i, grid), (j, kind) in itertools.product(enumerate(grids), enumerate(kinds)):
        window = Window.from_mode(grid, sizes[(3 * i + j) % 4], *kind)
        tokens = list(itertools.product(*map(range, grid)))
        keys = [[key[:2] for key in reference.attended_keys(window, *token)] for token in tokens]
        found = all(sorted(each) == tokens for each in keys)
        assert found == window.attends_all or (found and window.cyclic), window  # a cyclic one may
        verdicts.add((found, window.chunks == (1, 1)))
    assert len(verdicts) == 4


@pytest.mark.parametrize(
    ("dtype", "options", "name"),
    [
        (torch.float32, {}, "native"),
        (torch.float64, {}, "blocked"),  # exact
        (torch.float32, {"dropout": True}, "chunk_handgrad"),
    ],
)
def test_selection_on_a_cpu(dtype, options, name):
    if name == "native" and library.obstacle():
        pytest.skip(library.obstacle())
    assert choose(Case(Window((28, 28), 7), 8, 3, 32, dtype=dtype, **options)) == name


@torch.no_grad()
def test_bias_of_another_dtype_without_gradients():
    q, k, v = torch.randn(3, 1, 1, 9, 4)
    window = Window((3, 3), 3)
    bias = LocalBias(torch.randn(1, window.table_entries, dtype=torch.float64))
    found, wanted = (
        local_attention(q, k, v, window, bias=bias, backend=name)
        for name in ("masked", "chunk_autograd")
    )
    assert_close(found, wanted)


def test_a_name_that_earlier_runs_recorded_is_found_but_not_listed():
    assert "masked_sdpa" in BACKENDS
    assert "masked_sdpa" not in list(BACKENDS)
    case = Case(Window((3, 3), 3), 1, 1, 4)
    assert explain(case, "masked_sdpa")[choose(case, "masked_sdpa")] == "chosen, pinned"


@pytest.mark.long
def test_the_masked_backend_in_an_export_with_dynamic_sizes():
    class Attend(torch.nn.Module):
        def forward(self, x):
            rows, cols = x.shape[2:4]
            q = x.flatten(2, 3)
            return local_attention(q, q, q, Window((rows, cols), 2), backend="masked")

    x, y = torch.randn(1, 1, 5, 6, 4), torch.randn(1, 1, 7, 4, 4)
    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Attend(), (x,), dynamic_shapes=(sizes,), strict=False)
    assert_close(program.module()(y), Attend()(y))


def test_choice_and_reasons():
    case = Case(Window((3, 3), 3, -1), 1, 1, 4)
    assert choose(case) in BACKENDS
    listing = explain(case)
    assert list(listing.values()).count("chosen") == 1
    assert "keys repeat" in listing["masked"]
    assert explain(case, "masked")["masked"].startswith("pinned, but cannot run: keys repeat")
    assert "only the exact window" in listing["unfold_nnf"]
    with pytest.raises(ValueError, match="'masked' cannot run this call: keys repeat"):
        choose(case, "masked")
    with pytest.raises(
        ValueError, match=r"unknown backend 'maskd'; did you mean 'masked'\? \(choices: masked,"
    ):
        choose(case, "maskd")
    with pytest.raises(ValueError, match="unknown backend 'maskd'; did you mean 'masked'"):
        explain(case, "maskd")
    with restored_backends():
        BACKENDS.register("mine", BACKENDS["masked"].run, prepare=lambda: ["no compiler"])
        case = Case(Window((3, 3), 3), 1, 1, 4)
        assert explain(case)["mine"] == "could run", "it is prepared only if it is pinned"
        assert explain(case, "mine")["mine"] == "pinned, but cannot run: no compiler"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 11, 4)}, "q has 11 tokens, but the window's grid"),
        ({"k": torch.zeros(1, 2, 12, 4)}, r"k and v must have shape \(1, 2, 13, 4\)"),
        ({"v": torch.zeros(1, 2, 13, 4, dtype=torch.float64)}, "one floating-point dtype"),
        ({"v": torch.zeros(1, 2, 13, 4, device="meta")}, "v is on meta, but q is on cpu"),
        ({"bias": LocalBias(torch.zeros(2, 48))}, r"bias.table must have shape \(2, 49\)"),
        ({"bias": LocalBias(None, torch.zeros(2, 2))}, r"bias.to_global must have shape \(2, 1\)"),
        ({"valid_hw": torch.ones(2, 2)}, r"valid_hw must have shape \(batch, 2\)"),
        ({"q": torch.zeros(1, 0, 12, 4)}, "at least one head and one channel"),
        ({"q": torch.zeros(12, 4)}, r"q must be \(B, N, L, D\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_invalid_arguments_raise(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 12, 4),
        "k": torch.zeros(1, 2, 13, 4),
        "v": torch.zeros(1, 2, 13, 4),
    } | change
    with pytest.raises(ValueError, match=message):
        local_attention(window=Window((3, 4), 2), num_global=1, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 3), 2, 0, 0), "must be positive"),
        (((3, 3), 2, 2, 0), "the mask must be 1 .exact., 0 .chunks. or -1 .cyclic., got 2"),
        (((3, 3), 2, 0, 9), "mode must be"),
        (((3, 3), 2, 1, 3), "needs all nine chunks"),
    ],
)
def test_invalid_windows_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Window.from_mode(*arguments)
    with pytest.raises(ValueError, match="offsets must be"):
        Window((3, 3), 2, 0, ((0, 0), (0, 1), (0, 1)))
