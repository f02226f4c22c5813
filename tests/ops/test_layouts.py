"""Attention of a layout: every backend that accepts layouts equals the reference."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from tests.common.attention_cases import name_of
from tests.common.layout_cases import LAYOUTS, LocalPerHead
from vil.ops import BACKENDS, Case, LocalBias, choose, explain, local_attention, patterns
from vil.ops.backends.masked import MAX_MASKED_LENGTH
from vil.ops.layout import Layout
from vil.ops.native import library
from vil.ops.patterns import parse_pattern
from vil.ops.testing import errors, make_inputs

ACCEPT = ("blocked", "masked")  # the backends that compute layouts on a CPU, with gradients
COMPUTE = {*ACCEPT, "flex", "triton", "native"}  # see also test_flex, test_triton, test_native
PATTERNS = [
    "local:2",
    "axial",
    "dilated:2",
    "swin:4,2",
    "window:3",
    "gaussian:2,0.2",
    "random:0.1",
    "local:2 | global_tokens:2",
    "local:3 - local:1",
]
CALLS = [  # grid, chunk, G, table, to_global, padded images, dtype
    ((1, 1), 4, 0, True, False, False, torch.float64),
    ((5, 7), 4, 0, False, False, False, torch.float32),
    ((5, 7), 2, 1, True, True, True, torch.float64),
    ((9, 9), 4, 2, False, True, False, torch.bfloat16),
    ((9, 9), 3, 0, True, False, True, torch.float32),
    ((16, 16), 8, 1, True, True, False, torch.float64),
]


def case_of(pattern, grid, chunk, num_global, table, to_global, valid, dtype, heads=2, batch=2):
    layout = Layout(grid, chunk, pattern)
    bias = (table, to_global, valid)
    return Case(layout, batch, heads, 4, num_global, dtype, "cpu", *bias)


def assert_equal(case):
    for key, (error, bound) in errors(case, ACCEPT).items():
        assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"
    # without the gradient of a bias, torch's fused attention computes `masked`
    for each in (
        replace(case, table_bias=False, global_bias=False),
        replace(case, needs_grad=False),
    ):
        for key, (error, bound) in errors(each, ["masked"]).items():
            assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("text", PATTERNS)
def test_backend_equals_reference(text, call):
    assert_equal(case_of(parse_pattern(text), *call))


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS, ids=name_of)
def test_backend_equals_reference_on_every_pattern(case):
    assert_equal(case)


@pytest.mark.parametrize("call", [c for c in CALLS if c[0] == (5, 7)], ids=str)
def test_pattern_per_head_with_empty_rows(call):
    mask = torch.rand(2, 35, 35, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[:, 3] = False
    mask[1, :20] = False
    assert_equal(case_of(patterns.from_mask(mask), *call))


def test_invariant_pattern_per_head():
    case = case_of(LocalPerHead(), *CALLS[4])
    assert_equal(case)
    assert case.window.count_pairs() == case.window.mask.sum()


@pytest.mark.parametrize("name", ACCEPT)
def test_token_that_sees_nothing_gives_zero(name):
    mask = torch.ones(35, 35, dtype=torch.bool)
    mask[[3, 30]] = False
    case = case_of(patterns.from_mask(mask), (5, 7), 3, 0, True, False, False, torch.float32)
    inputs = make_inputs(case)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.table)]
    bias = LocalBias(inputs.table)
    out = local_attention(*leaves[:3], case.window, bias=bias, backend=name)
    assert out[:, :, [3, 30]].abs().max() == 0
    assert out[:, :, 4].abs().min() > 0
    grads = torch.autograd.grad(out, leaves, inputs.cotangent)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :, [3, 30]].abs().max() == 0


@pytest.mark.parametrize("name", ACCEPT)
def test_far_pairs_share_the_bias_of_the_largest_reach(name):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 35, 4, generator=generator, dtype=torch.float64)
    small = Layout((5, 7), 3, patterns.axial(), max_reach=(1, 2))
    large = Layout((5, 7), 3, patterns.axial())
    table = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    rows, cols = torch.arange(-4, 5).clamp(-1, 1) + 1, torch.arange(-6, 7).clamp(-2, 2) + 2
    wide = LocalBias(table[:, rows][:, :, cols].flatten(1))
    first = local_attention(q, k, v, small, bias=LocalBias(table.flatten(1)), backend=name)
    second = local_attention(q, k, v, large, bias=wide, backend=name)
    torch.testing.assert_close(first, second)


def test_chunk_size_does_not_change_the_result():
    case = case_of(parse_pattern("axial | local:2"), (9, 9), 3, 1, True, True, True, torch.float64)
    inputs = make_inputs(case)
    options = dict(num_global=1, bias=LocalBias(inputs.table, inputs.to_global))
    outputs = [
        local_attention(
            inputs.q, inputs.k, inputs.v, Layout((9, 9), chunk, case.window.pattern),
            valid_hw=inputs.valid_hw, backend="blocked", **options,
        )
        for chunk in (1, 2, 3, 5, 9, 20)
    ]  # fmt: skip
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0])


def test_other_backends_say_why_they_cannot_run():
    case = case_of(patterns.axial(), *CALLS[1])
    for name, verdict in explain(case).items():
        can_run = name in ACCEPT or (name == "native" and not library.obstacle())
        assert can_run == (verdict in ("chosen", "could run")), f"{name}: {verdict}"
    with pytest.raises(ValueError, match="gathered.*it computes windows, not patterns"):
        choose(case, "gathered")
    verdicts = explain(Case(Layout((91, 91), 7, patterns.axial()), 1, 1, 4, dropout=True))
    assert "dropout" in verdicts["blocked"]
    assert "8281 tokens are more than" in verdicts["masked"]
    assert not any(verdict.startswith("chosen") for verdict in verdicts.values())


def test_native_is_chosen_where_it_can_run():
    for pattern in (patterns.dilated(2), patterns.local(3)):
        case = Case(Layout((16, 16), 4, pattern), 1, 2, 8)
        assert (choose(case) == "native") != bool(library.obstacle())


def test_without_native_a_backend_is_chosen_by_density(without_native):
    dense = Case(Layout((16, 16), 4, patterns.dilated(2)), 1, 2, 8)
    sparse = Case(Layout((16, 16), 4, patterns.local(3)), 1, 2, 8)
    assert dense.window.density == 1
    assert sparse.window.density < 0.5
    assert (choose(dense), choose(sparse)) == ("masked", "blocked")
    large = Case(Layout((100, 100), 10, patterns.dilated(2)), 1, 1, 8)
    assert large.window.length > MAX_MASKED_LENGTH
    assert choose(large) == "blocked"
    assert choose(Case(sparse.window, 1, 2, 8, dropout=True)) == "masked"


def test_wrong_calls_are_refused():
    q = torch.randn(1, 3, 35, 4)
    layout = Layout((5, 7), 3, patterns.local(2))
    with pytest.raises(ValueError, match=r"shape \(3, 25\) for .* up to \(2, 2\) of local:2,max"):
        local_attention(q, q, q, layout, bias=LocalBias(torch.zeros(3, 9)))
    two = patterns.from_mask(torch.ones(2, 35, 35, dtype=torch.bool))
    with pytest.raises(ValueError, match="q has 3 heads, but the pattern .* has 2"):
        local_attention(q, q, q, Layout((5, 7), 3, two))
    with pytest.raises(ValueError, match="grid and chunk must be positive"):
        Layout((5, 7), 0, patterns.local(2))


@pytest.mark.parametrize("name", ACCEPT)
def test_gradients_equal_finite_differences(name):
    case = case_of(parse_pattern("local:1 | global_tokens:1"), (3, 4), 2, 1, True, True, False,
                   torch.float64, batch=1)  # fmt: skip
    inputs = make_inputs(case)

    def attend(q, k, v, table, to_global):
        bias = LocalBias(table, to_global)
        return local_attention(q, k, v, case.window, num_global=1, bias=bias, backend=name)

    leaves = (inputs.q, inputs.k, inputs.v, inputs.table, inputs.to_global)
    assert gradcheck(attend, [x.requires_grad_() for x in leaves])


def test_forward_mode_and_vmap():
    layout = Layout((5, 7), 3, patterns.local(2))
    q, k, v, tangent = torch.randn(4, 2, 2, 35, 4, dtype=torch.float64)

    def attend(q):
        return local_attention(q, k, v, layout)

    _, out = torch.func.jvp(attend, (q,), (tangent,))
    step = 1e-6
    expected = (attend(q + step * tangent) - attend(q - step * tangent)) / (2 * step)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)

    def loss(q, k, v):
        return local_attention(q[None], k[None], v[None], layout).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    plain = torch.stack([torch.func.grad(loss)(*x) for x in zip(q, k, v)])
    torch.testing.assert_close(each, plain)


def test_operator_is_correct_under_torch_compile():
    layout = Layout((9, 9), 3, parse_pattern("axial | local:1"))
    q = torch.randn(1, 2, 81, 4, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q):
        return local_attention(q, q, q, layout, backend="blocked") * 2

    plain = local_attention(q, q, q, layout, backend="blocked") * 2
    torch.testing.assert_close(attend(q), plain)
    (first,), (second,) = (torch.autograd.grad(x.sum(), q) for x in (attend(q), plain))
    torch.testing.assert_close(first, second)


def test_flops_are_those_of_the_listed_chunks():
    layout = Layout((8, 8), 4, patterns.swin(4))
    q = torch.randn(2, 3, 64, 5, requires_grad=True)
    k = torch.randn(2, 3, 65, 5)
    with FlopCounterMode(display=False) as counter:
        local_attention(q, k, k, layout, num_global=1, backend="blocked").sum().backward()
    pairs = 4 * 16 * 16 + 64  # four chunks attend to themselves, all tokens to the global one
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 3 * 5 * pairs


def test_dropout_drops_weights():
    layout = Layout((5, 7), 3, patterns.local(2))
    v = torch.ones(1, 1, 35, 4)
    q = torch.zeros(1, 1, 35, 4)
    torch.manual_seed(0)
    out = local_attention(q, q, v, layout, dropout_p=0.5)
    assert out.std() > 0
    assert 0.7 < out.mean() < 1.3


def test_all_backends_are_decided():
    """A new backend must state whether it computes layouts."""
    case = case_of(patterns.axial(), *CALLS[1])
    refusing = {
        name
        for name, entry in BACKENDS.items()
        if "it computes windows, not patterns" in entry.unsupported(case)
    }
    assert refusing == set(BACKENDS) - COMPUTE
