"""A linear layer with its norm and residual as one operation, and when it is compiled code."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.common.compiled_layers import assert_traced_alike, assert_trains_alike
from tests.common.native_cache import needs_compiler
from vil.layers.attention import build_attention
from vil.layers.block import Block
from vil.layers.fused_attention import can_fuse
from vil.ops.dispatch import CHOICES
from vil.ops.linear import Norm, linear, linear_native, linear_torch, pack_weight
from vil.ops.linear_case import (
    MLP,
    NAMES,
    NORM_LINEAR,
    LinearCase,
    by_rule,
    choose,
    is_packed_native,
)
from vil.ops.native import library
from vil.ops.operator_call import call_operator
from vil.ops.tuning import linear_tuner
from vil.ops.tuning.linear_tuner import (
    make_tensors,
    reason_against_native,
    tune_linear,
)

HALVES = [torch.bfloat16] if library.has_bfloat16() else []
DTYPES = [torch.float32, *HALVES]
KINDS = [kind for kind in NAMES if kind != MLP]
CASE = LinearCase("norm linear residual", 301, 48, 80)


def results(compute, case, tensors, dtype=None):
    """Return {name: output, or gradient of x, a weight or the residual}."""
    x, weights, cotangent = tensors
    leaves = {name: t.detach().to(dtype or t.dtype) for name, t in {"x": x, **weights}.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    x, *rest = leaves.values()
    out = linear_tuner._run_linear(compute, x, dict(zip(weights, rest)))
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))
    return dict(zip(("out", *leaves), (out.detach(), *grads)))


def assert_as_exact_as_torch(case, dtype=None, autocast=False):
    """Compare with float64, by the error that torch's operators make."""
    tensors = make_tensors(case)
    exact = results(linear_torch, case, tensors, torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = results(linear_torch, case, tensors, dtype)
        found = results(linear_native, case, tensors, dtype)
    for name, right in exact.items():
        near, value = plain[name], found[name]
        assert (value.dtype, value.shape) == (near.dtype, near.shape), name
        eps = torch.finfo(torch.bfloat16 if autocast else near.dtype).eps
        bound = 4 * (near - right).abs().max() + 4 * eps * right.abs().max()
        assert (value - right).abs().max() <= bound, name


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 15, 16, 257, 1003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_torch_on_any_number_of_threads(kind, dtype, tokens, threads):
    assert_as_exact_as_torch(replace(CASE, kind=kind, tokens=tokens), dtype)


@needs_compiler
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (208, 400)], ids=str)
@pytest.mark.parametrize("autocast", [False, *[True] * len(HALVES)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_torch_on_other_widths(kind, sizes, autocast):
    assert_as_exact_as_torch(LinearCase(kind, 77, *sizes), autocast=autocast)


@needs_compiler
@pytest.mark.skipif(not HALVES, reason="bfloat16 needs AVX512-BF16")
def test_tokens_and_residual_may_differ_in_dtype():
    """Under autocast, attention outputs are bfloat16 and the tokens of a block float32."""
    x, w = torch.randn(33, 48, dtype=torch.bfloat16), torch.randn(32, 48) / 7
    full, half = torch.randn(33, 32), torch.randn(33, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for residual in (full, half):
            found, wanted = (f(x, w, residual=residual) for f in (linear_native, linear_torch))
            assert found.dtype == wanted.dtype == residual.dtype
            torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)


@needs_compiler
def test_other_dtypes_use_torch(monkeypatch):
    """float64 stays float64, under autocast too."""
    monkeypatch.setattr("vil.ops.linear_case.choose", lambda case: "native")
    CHOICES["any"] = "native"
    x, w = torch.randn(5, 16).double(), torch.randn(16, 16).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w).dtype == nn.functional.linear(x, w).dtype
    short = torch.randn(5, 16, dtype=torch.bfloat16)
    assert linear(x.float(), w.float(), residual=short).dtype == torch.float32


@needs_compiler
def test_wrong_shapes_are_errors():
    x = torch.randn(5, 32)
    for tensors in ((x, torch.randn(16, 48)), (x, torch.randn(17, 32)), (x[:, :8], x[:, :8])):
        with pytest.raises(ValueError, match="cannot multiply"):
            linear_native(*tensors)
    with pytest.raises(ValueError, match="expected a residual of"):
        linear_native(x, torch.randn(16, 32), residual=torch.randn(1, 16))


@needs_compiler
def test_the_default_dtype_does_not_matter():
    weight = torch.randn(32, 48)
    wanted = pack_weight(weight, half=False)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(pack_weight(weight, half=False), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_bit_for_bit(dtype, threads):
    tensors = make_tensors(CASE)
    first, second = (results(linear_native, CASE, tensors, dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_compiler
@pytest.mark.parametrize("sizes", [(5001, 48, 80), (90, 208, 400)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, MLP])
def test_the_result_does_not_depend_on_the_number_of_threads(kind, dtype, sizes):
    case, found, before = LinearCase(kind, *sizes, dtype), [], torch.get_num_threads()
    x, weights, cotangent = make_tensors(case)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = linear_tuner.backends(case)["native"](x, weights)
        grads = torch.autograd.grad(out, (x, *weights.values()), cotangent.to(out.dtype))
        found.append((out, *grads))
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in found for pair in zip(found[0], other))


@needs_compiler
def test_inputs_may_have_any_strides_and_leading_dimensions():
    x, w, residual = torch.randn(3, 20, 48), torch.randn(48, 32).T, torch.randn(20, 3, 32)
    found = linear_native(x.transpose(0, 1), w, residual=residual)
    torch.testing.assert_close(found, linear_torch(x.transpose(0, 1), w, residual=residual))
    assert linear_native(x[:0], w).shape == (0, 20, 32)
    empty = x[:0].requires_grad_()
    weight = w.clone().requires_grad_()
    grads = torch.autograd.grad(linear_native(empty, weight).sum(), (empty, weight))
    assert grads[0].shape == (0, 20, 48)
    assert not grads[1].any()


@needs_compiler
@pytest.mark.parametrize("needed", ["x", "gain", "shift", "weight", "bias", "residual"])
def test_one_gradient_alone(needed):
    x, weights, cotangent = make_tensors(replace(CASE, needs_grad=False))
    tensors = {"x": x, **weights}
    tensors[needed].requires_grad_()
    rest = {name: tensors[name] for name in weights}
    wanted, found = (
        torch.autograd.grad(linear_tuner._run_linear(f, x, rest), tensors[needed], cotangent)[0]
        for f in (linear_torch, linear_native)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_packed_weights_give_the_same_outputs_but_no_gradients():
    x, weight = torch.randn(33, 48, requires_grad=True), torch.randn(80, 48)
    packed = pack_weight(weight, half=False)
    out = linear_native(x, packed, packed=True)
    assert torch.equal(out, linear_native(x, weight))
    with pytest.raises(RuntimeError, match="packed weights has no gradients"):
        out.sum().backward()


@needs_compiler
def test_the_second_derivative_is_that_of_torch():
    x, weights, cotangent = make_tensors(LinearCase("norm linear", 9, 16, 32))

    def second(compute):
        out = linear_tuner._run_linear(compute, x, weights)
        (first,) = torch.autograd.grad(out, x, cotangent, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weights["weight"])[0]

    torch.testing.assert_close(second(linear_native), second(linear_torch))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_its_multiplications_are_counted(kind):
    x, weights, cotangent = make_tensors(replace(CASE, kind=kind))
    counts = []
    for compute in (linear_torch, linear_native):
        with FlopCounterMode(display=False) as counter:
            out = linear_tuner._run_linear(compute, x, weights)
            torch.autograd.grad(out, (x, *weights.values()), cotangent)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_tuning_stores_the_faster_backend(kind):
    case = replace(CASE, kind=kind)
    trials = tune_linear(case, rounds=1)
    assert {trial.name for trial in trials if not trial.reason} == {"torch", "native"}
    assert {case.bucket(): trials[0].name} == CHOICES
    assert choose(replace(case, tokens=400)) == trials[0].name


@needs_compiler
@pytest.mark.parametrize("name", ["gain", "weight", "residual"])
def test_tuning_rejects_a_wrong_gradient(name, monkeypatch):
    def wrong(x, weight, bias, *, norm, residual):
        given = {"gain": norm.gain, "weight": weight, "residual": residual}
        given[name] = given[name] + 0.01 * (given[name] - given[name].detach())
        norm = Norm(given["gain"], norm.shift, norm.eps)
        return linear_native(x, given["weight"], bias, norm=norm, residual=given["residual"])

    monkeypatch.setitem(linear_tuner.LINEARS, "native", wrong)
    assert f"wrong: d{name} is off by" in reason_against_native(CASE)


# --- in a block


@pytest.fixture(params=["longformer", "full"])
def block(request):
    torch.manual_seed(0)
    window = {"window": 3} if request.param == "longformer" else {}
    return Block(build_attention(request.param, dim=48, num_heads=3, **window)).eval()


@pytest.fixture
def native_everywhere(monkeypatch):
    """Let `native` be chosen for every linear layer, and count its calls."""
    calls = []

    def counted(operator, *args):
        calls.append((args[1] is not None, args[5] is not None))
        return call_operator(operator, *args)

    CHOICES["any"] = "native"
    monkeypatch.setattr(
        "vil.ops.linear_case.choose",
        lambda case: "torch" if case.kind == MLP else CHOICES.get("any", "torch"),
    )
    monkeypatch.setattr("vil.ops.linear.call_operator", counted)
    return calls


FUSED = [(True, False), (False, True)]  # (has a norm, has a residual) of both calls
SEPARATE = (False, False)


@needs_compiler
def test_a_block_computes_its_attention_branch_by_two_calls(block, native_everywhere):
    x = torch.randn(2, 17, 48)
    found, branch = block(x, (4, 4)), block.attn_branch(x, (4, 4))
    assert native_everywhere == [*FUSED, (True, False), SEPARATE]
    CHOICES.clear()
    torch.testing.assert_close(found, block(x, (4, 4)))
    torch.testing.assert_close(branch, block.attn_branch(x, (4, 4)))
    assert len(native_everywhere) == 4


@needs_compiler
def test_stochastic_depth_comes_before_the_residual(native_everywhere):
    attention = build_attention("full", dim=48, num_heads=3)
    block = Block(attention, drop_path=0.5).train()
    x = torch.randn(2, 17, 48)
    torch.manual_seed(1)
    found = block(x, (4, 4))
    assert native_everywhere == [(True, False), SEPARATE]
    CHOICES.clear()
    torch.manual_seed(1)
    torch.testing.assert_close(found, block(x, (4, 4)))


@needs_compiler
def test_another_module_for_stochastic_depth_is_called(native_everywhere):
    block = Block(build_attention("full", dim=48, num_heads=3)).eval()
    block.drop_path = nn.Threshold(0.0, 0.0)
    x = torch.randn(2, 17, 48)
    found = block(x, (4, 4))
    CHOICES.clear()
    torch.testing.assert_close(found, block(x, (4, 4)))


def hooked_norm(block):
    block.norm1.register_forward_pre_hook(lambda *args: None)


def hooked_attention(block):
    block.attn.register_forward_hook(lambda *args: None)


def hooked_layer(block):
    block.attn.proj.register_full_backward_hook(lambda *args: None)


def other_norm(block):
    block.norm1 = nn.Identity()


def other_linear(block):
    block.attn.proj = type("Lora", (nn.Linear,), {})(48, 48)


def own_forward(block):
    cls = type(block.attn)
    block.attn.__class__ = type(
        "Own", (cls,), {"forward": lambda self, *args: 2 * cls.forward(self, *args)}
    )


def replaced_forward(block):
    before = block.attn.forward
    block.attn.forward = lambda *args: 2 * before(*args)


def replaced_layer_forward(block):
    before = block.attn.proj.forward
    block.attn.proj.forward = lambda x: 2 * before(x)


def dropout(block):
    block.attn.proj_drop.p = 0.5
    block.train()


CHANGES = (
    hooked_norm, hooked_attention, hooked_layer, other_norm, other_linear, own_forward,
    replaced_forward, replaced_layer_forward, dropout,
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_modules_that_do_something_else_are_called(block, native_everywhere, change):
    assert can_fuse(block.norm1, block.attn)
    change(block)
    assert not can_fuse(block.norm1, block.attn)
    x = torch.randn(1, 5, 48)
    torch.manual_seed(1)
    found = block.attn_branch(x, (2, 2))
    torch.manual_seed(1)
    torch.testing.assert_close(found, block.attn(block.norm1(x), (2, 2)), rtol=0, atol=0)
    assert (True, False) not in native_everywhere


@needs_compiler
def test_padding_is_hidden_after_the_norm(block, native_everywhere):
    x = torch.randn(1, 17, 48)
    valid = torch.tensor([[3, 4]])
    x[0, 13:] = float("nan")
    assert block(x, (4, 4), valid)[0, :13].isfinite().all()
    assert (True, False) not in native_everywhere


@needs_compiler
def test_tools_that_trace_see_the_operators_of_torch(block, native_everywhere):
    x = torch.randn(2, 17, 48)
    weight, bias = (t.detach() for t in block.attn.proj.parameters())

    def compute(x):
        return linear(x, weight, bias)

    wanted = nn.functional.linear(x, weight, bias)
    assert_traced_alike(compute, x, wanted)
    program = torch.export.export(block, (x, (4, 4)))
    assert "vil.linear" not in str(program.graph)
    assert not native_everywhere


@needs_compiler
def test_a_model_trains_alike(native_everywhere):
    assert_trains_alike()
    assert native_everywhere


# --- selection without tuning


@needs_compiler
@pytest.mark.parametrize("phase", ["training", "evaluation", "optimized for inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, MLP])
def test_the_rule_depends_on_tokens_and_channels(kind, dtype, phase):
    case = LinearCase(kind, 50_000, 48, 48, dtype, packed="inf" in phase)
    case = replace(case, needs_grad=phase == "training")
    if kind in (NORM_LINEAR, MLP) or not case.packed:
        assert choose(case) == by_rule(case) == "native", "many tokens with few channels"
    assert choose(replace(case, tokens=1, dim=1536)) == "torch"
    found = [by_rule(replace(case, tokens=tokens)) for tokens in (1, 100, 1000, 10_000, 100_000)]
    assert found == sorted(found, reverse=True), "from a number of tokens on"
    CHOICES[case.bucket()] = "torch"
    assert choose(case) == "torch", "tuning comes first"


@needs_compiler
@pytest.mark.parametrize("kind", [NORM_LINEAR, MLP])
def test_layers_of_optimized_models_are_packed_by_the_rule(kind):
    assert is_packed_native(kind, 32, 128, torch.float32)
    assert not is_packed_native(kind, 1536, 6144, torch.float32)


@needs_compiler
def test_many_threads_need_many_tokens(monkeypatch):
    """The code divides a call into parts by its size, and every thread needs one."""
    few, many = (LinearCase(MLP, tokens, 96, 384) for tokens in (5000, 50_000))
    assert by_rule(few) == by_rule(many) == "native"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    assert (by_rule(few), by_rule(many)) == ("torch", "native")
    assert by_rule(replace(many, dim=384, features=1536)) == "torch", "too many gradients"


@needs_compiler
def test_a_library_without_bfloat16_is_not_used_for_it(monkeypatch):
    """What the compiler can do is known only after it has run."""
    loaded = []
    monkeypatch.setattr(library, "has_bfloat16", lambda: not loaded)
    monkeypatch.setattr(library, "prepare", lambda: loaded.append(True) or [])
    case = LinearCase(MLP, 50_000, 48, 192, torch.bfloat16)
    CHOICES[case.bucket()] = "native"
    assert choose(case) == "torch"
    assert is_packed_native(MLP, 48, 192, torch.bfloat16) is False


def test_a_case_for_torch_does_not_load_the_library(monkeypatch):
    def prepare():
        raise AssertionError("loaded")

    monkeypatch.setattr(library, "prepare", prepare)
    assert choose(LinearCase(NORM_LINEAR, 10, 1536, 1536)) == "torch"
    assert not is_packed_native(NORM_LINEAR, 1536, 1536, torch.float32)
