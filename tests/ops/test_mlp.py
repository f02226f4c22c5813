"""The norm and MLP of a block as one operation: values, gradients, and when it is compiled code."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.common.compiled_layers import assert_traced_alike, assert_trains_alike
from tests.common.native_cache import needs_compiler
from vil.layers.attention import build_attention
from vil.layers.block import Block, apply_norm_mlp, mlp_weights
from vil.ops.dispatch import CHOICES
from vil.ops.linear_case import MLP, LinearCase, by_rule, choose
from vil.ops.mlp import SAVED_DIM, MlpWeights, norm_mlp, norm_mlp_native, norm_mlp_torch
from vil.ops.native import library
from vil.ops.operator_call import call_operator
from vil.ops.tuning import linear_tuner
from vil.ops.tuning.linear_tuner import reason_against_native, tune_linear

HALVES = [torch.bfloat16] if library.has_bfloat16() else []
DTYPES = [torch.float32, *HALVES]
TOKENS = (1, 15, 16, 257, 1003)  # of one task and several, with complete and incomplete blocks
CASE = LinearCase(MLP, 301, 48, 192)


def make_tensors(case):
    """Return random (x, weights, gradient of the output)."""
    x, weights, cotangent = linear_tuner.make_tensors(case)
    return x, MlpWeights(**weights), cotangent


def results(compute, x, weights, cotangent, **options):
    """Return the output, and the gradients of x and the weights."""
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    out = compute(leaves[0], MlpWeights(*leaves[1:]), eps=1e-6, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def assert_as_exact_as_torch(compute, x, weights, cotangent, **options):
    """Compare with float64, by the error that torch's operators make."""
    exact = results(norm_mlp_torch, x.double(), [w.double() for w in weights], cotangent, **options)
    plain = results(norm_mlp_torch, x, weights, cotangent, **options)
    found = results(compute, x, weights, cotangent, **options)
    for right, near, value in zip(exact, plain, found):
        assert (value.dtype, value.shape) == (near.dtype, near.shape)
        rounding = torch.finfo(near.dtype).eps * right.abs().max()
        bound = 4 * (near - right).abs().max() + 4 * rounding
        assert (value - right).abs().max() <= bound


@needs_compiler
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_torch_on_any_number_of_threads(dtype, tokens, residual, threads):
    x, weights, cotangent = make_tensors(replace(CASE, tokens=tokens))
    x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    assert_as_exact_as_torch(norm_mlp_native, x, weights, cotangent, residual=residual)


@needs_compiler
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (80, 48), (208, 832)], ids=str)
@pytest.mark.parametrize("autocast", [False, *[True] * len(HALVES)])
def test_it_equals_torch_on_other_widths(sizes, autocast):
    x, weights, cotangent = make_tensors(LinearCase(MLP, 77, *sizes))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_as_exact_as_torch(norm_mlp_native, x, weights, cotangent, residual=True)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_equal_activations_stay_finite(dtype):
    """GELU far out is its input or 0, and the norm of equal channels is its shift."""
    x, weights, cotangent = make_tensors(replace(CASE, tokens=40))
    x = torch.cat([x[:20] * 1e4, torch.full_like(x[20:], 3.0)]).detach()
    weights = weights._replace(gain=weights.gain.detach() * 1e3)
    weights = [w.to(dtype) for w in weights]
    assert_as_exact_as_torch(norm_mlp_native, x.to(dtype), weights, cotangent)


@needs_compiler
def test_values_that_are_not_finite_show():
    for value in (float("nan"), float("inf")):
        x, weights, _ = make_tensors(replace(CASE, needs_grad=False))
        x[7, 3] = value
        out = norm_mlp_native(x, weights, eps=1e-6)
        assert out[7].isnan().all()
        assert out[torch.arange(len(out)) != 7].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_bit_for_bit(dtype, threads):
    x, weights, cotangent = make_tensors(CASE)
    x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    first, second = (results(norm_mlp_native, x, weights, cotangent) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@needs_compiler
def test_inputs_may_have_any_strides_and_leading_dimensions():
    x, weights, _ = make_tensors(replace(CASE, tokens=60, needs_grad=False))
    wanted = norm_mlp_native(x, weights, eps=1e-6).view(3, 20, 48).transpose(0, 1)
    found = norm_mlp_native(x.view(3, 20, 48).transpose(0, 1), weights, eps=1e-6)
    assert torch.equal(found, wanted)
    empty = norm_mlp_native(x[:0], weights, eps=1e-6)
    assert empty.shape == (0, 48)


@needs_compiler
def test_the_second_derivative_is_that_of_torch():
    x, weights, cotangent = make_tensors(LinearCase(MLP, 9, 16, 32))

    def second(compute):
        out = compute(x, weights, eps=1e-6)
        (first,) = torch.autograd.grad(out, x, cotangent, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weights.weight1)[0]

    torch.testing.assert_close(second(norm_mlp_native), second(norm_mlp_torch))


@needs_compiler
def test_only_the_needed_gradients_are_returned():
    x, weights, cotangent = make_tensors(replace(CASE, needs_grad=False))
    x.requires_grad_()
    out = norm_mlp_native(x, weights, eps=1e-6)
    assert torch.autograd.grad(out, x, cotangent)[0].shape == x.shape


@needs_compiler
@pytest.mark.parametrize(("dim", "matmuls"), [(48, 5), (SAVED_DIM, 4)])
def test_its_multiplications_are_counted(dim, matmuls):
    """Few channels: hidden activations are computed again in the backward pass."""
    x, weights, cotangent = make_tensors(replace(CASE, tokens=10, dim=dim))
    counts = []
    for compute in (norm_mlp_torch, norm_mlp_native):
        with FlopCounterMode(display=False) as counter:
            out = compute(x, weights, eps=1e-6)
            forward = counter.get_total_flops()
            torch.autograd.grad(out, (x, *weights), cotangent)
        counts.append((forward, counter.get_total_flops() - forward))
    (forward, backward), (native_forward, native_backward) = counts
    assert native_forward == forward
    assert native_backward == backward * matmuls / 4


def test_it_says_what_it_cannot_compute():
    reasons = {
        "it needs a CPU, not cuda": replace(CASE, device="cuda"),
        "not in float16": replace(CASE, dtype=torch.float16),
        "channels must be multiples of 16": replace(CASE, dim=50),
    }
    for reason, case in reasons.items():
        assert any(reason in text for text in case.unsupported())
        CHOICES[case.bucket()] = "native"
        assert choose(case) == "torch"


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tuning_stores_the_faster_backend(dtype):
    case = replace(CASE, dtype=dtype)
    trials = tune_linear(case, rounds=1)
    assert {trial.name for trial in trials if not trial.reason} == {"torch", "native"}
    assert all(trial.forward > 0 and trial.backward > 0 for trial in trials)
    assert {case.bucket(): trials[0].name} == CHOICES
    assert trials[0].seconds <= trials[1].seconds
    CHOICES[case.bucket()] = other = {"torch": "native", "native": "torch"}[by_rule(case)]
    similar = replace(case, tokens=400)
    assert choose(similar) == other, "the next power of two is the same"
    for different in (replace(case, tokens=600), replace(case, needs_grad=False)):
        assert choose(different) == by_rule(different)


@needs_compiler
@pytest.mark.parametrize("name", ["shift", "bias2", "weight1"])
def test_tuning_rejects_a_wrong_gradient(name, monkeypatch):
    def wrong(x, weights, **options):
        weight = getattr(weights, name)
        changed = weight + 0.01 * (weight - weight.detach())
        return norm_mlp_native(x, weights._replace(**{name: changed}), **options)

    monkeypatch.setitem(linear_tuner.MLPS, "native", wrong)
    assert f"wrong: d{name} is off by" in reason_against_native(CASE)
    trials = {trial.name: trial for trial in tune_linear(CASE, rounds=1)}
    assert "wrong" in trials["native"].reason
    assert CHOICES[CASE.bucket()] == "torch"


# --- in a block


@pytest.fixture
def block():
    torch.manual_seed(0)
    attention = build_attention("longformer", dim=48, num_heads=3, window=3)
    return Block(attention, drop=0.1).eval()


@pytest.fixture
def native_everywhere(monkeypatch):
    """Let `native` be chosen for every call, and count its calls."""
    calls = []

    def counted(operator, *args):
        calls.append(args[0].shape)
        return call_operator(operator, *args)

    CHOICES["any"] = "native"
    monkeypatch.setattr(
        "vil.ops.linear_case.choose",
        lambda case: CHOICES.get("any", "torch") if case.kind == MLP else "torch",
    )
    monkeypatch.setattr("vil.ops.mlp.call_operator", counted)
    return calls


def test_other_devices_use_the_modules(block, native_everywhere):
    meta = block.to("meta")
    assert meta(torch.empty(2, 17, 48, device="meta"), (4, 4)).shape == (2, 17, 48)
    assert not native_everywhere


@needs_compiler
def test_a_block_computes_its_second_half_by_it(block, native_everywhere):
    x = torch.randn(2, 17, 48)
    found = block(x, (4, 4))
    assert native_everywhere == [x.shape]
    CHOICES.clear()
    torch.testing.assert_close(found, block(x, (4, 4)))
    assert len(native_everywhere) == 1


def hooked(block):
    block.mlp.fc2.register_forward_hook(lambda *args: None)


def hooked_norm(block):
    block.norm2.register_forward_pre_hook(lambda *args: None)


def other_activation(block):
    block.mlp.act = nn.ReLU()


def other_gelu(block):
    block.mlp.act = nn.GELU("tanh")


def other_linear(block):
    block.mlp.fc1 = type("Lora", (nn.Linear,), {})(48, 192)


def other_norm(block):
    block.norm2 = nn.Identity()


def without_bias(block):
    block.mlp.fc1 = nn.Linear(48, 192, bias=False)


def training(block):
    block.train()


CHANGES = (
    hooked,
    hooked_norm,
    other_activation,
    other_gelu,
    other_linear,
    other_norm,
    without_bias,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_modules_that_do_something_else_are_called(block, native_everywhere, change):
    assert mlp_weights(block.norm2, block.mlp)
    change(block)
    assert mlp_weights(block.norm2, block.mlp) is None
    x = torch.randn(1, 5, 48)
    torch.manual_seed(1)
    found = apply_norm_mlp(block.norm2, block.mlp, x, residual=True)
    torch.manual_seed(1)
    assert torch.equal(found, x + block.mlp(block.norm2(x)))
    assert not native_everywhere


@needs_compiler
def test_tools_that_trace_see_the_operators_of_torch(block, native_everywhere):
    x = torch.randn(2, 5, 48)
    weights = MlpWeights(*(w.detach() for w in mlp_weights(block.norm2, block.mlp)))

    def compute(x):
        return norm_mlp(x, weights, eps=1e-6)

    wanted = norm_mlp_torch(x, weights, eps=1e-6)
    assert_traced_alike(compute, x, wanted)
    program = torch.export.export(block, (torch.randn(2, 17, 48), (4, 4)))
    assert "norm_mlp" not in str(program.graph)
    assert not native_everywhere


@needs_compiler
def test_a_model_trains_alike(native_everywhere):
    assert_trains_alike()
    assert native_everywhere
