"""Attention of a layout: every backend that accepts layouts equals the reference."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from tests.common.attention_cases import name_of
from tests.common.layout_cases import LAYOUTS
from vil.ops import BACKENDS, Case, LocalBias, choose, explain, local_attention, patterns
from vil.ops.backends.masked import MAX_MASKED_LENGTH
from vil.ops.layout import Layout
from vil.ops.native import library
from vil.ops.patterns import parse_pattern
from vil.ops.testing import errors, make_inputs

ANYWHERE = ("blocked", "masked")
ON_CPU = (*ANYWHERE, *(["native"] if not library.obstacle() else []))  # see test_triton
SMALL = Case(Layout((5, 7), 4, patterns.axial()), 2, 2, 4)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "case", LAYOUTS + [replace(case, dtype=torch.float64) for case in LAYOUTS[::3]], ids=name_of
)
def test_backends_equal_the_reference(case):
    able = [name for name in ON_CPU if not BACKENDS[name].unsupported(case)]
    assert {*ANYWHERE} <= {*able}
    found = errors(case, able)
    if case.table_bias or case.global_bias:  # else torch's fused attention computes `masked`
        found |= errors(replace(case, table_bias=False, global_bias=False), ["masked"])
    for key, (error, bound) in found.items():
        assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"


@pytest.mark.parametrize("name", ON_CPU)
def test_token_that_sees_nothing_gives_zero(name):
    mask = torch.ones(35, 35, dtype=torch.bool)
    mask[[3, 30]] = False
    case = replace(SMALL, window=Layout((5, 7), 3, patterns.from_mask(mask)), table_bias=True)
    inputs = make_inputs(case)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.table)]
    bias = LocalBias(inputs.table)
    out = local_attention(*leaves[:3], case.window, bias=bias, backend=name)
    assert out[:, :, [3, 30]].abs().max() == 0
    assert out[:, :, 4].abs().min() > 0
    grads = torch.autograd.grad(out, leaves, inputs.cotangent)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :, [3, 30]].abs().max() == 0


@pytest.mark.parametrize("name", ANYWHERE)
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


def test_other_backends_say_why_they_cannot_run():
    for name, verdict in explain(SMALL).items():
        assert (name in ON_CPU) == (verdict in ("chosen", "could run")), f"{name}: {verdict}"
    with pytest.raises(ValueError, match="gathered.*it computes windows, not patterns"):
        choose(SMALL, "gathered")
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


@pytest.mark.parametrize("name", ANYWHERE)
def test_gradients_equal_finite_differences(name):
    layout = Layout((3, 4), 2, parse_pattern("local:1 | global_tokens:1"))
    case = Case(layout, 1, 2, 4, 1, torch.float64, table_bias=True, global_bias=True)
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


def test_dropout_drops_weights():
    layout = Layout((5, 7), 3, patterns.local(2))
    v = torch.ones(1, 1, 35, 4)
    q = torch.zeros(1, 1, 35, 4)
    torch.manual_seed(0)
    out = local_attention(q, q, v, layout, dropout_p=0.5)
    assert out.std() > 0
    assert 0.7 < out.mean() < 1.3
