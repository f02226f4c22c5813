"""Linear layers and the MLP, each with its norm and residual as one operation: values, gradients,
and when compiled code computes them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.common.compiled_layers import assert_traced_alike, assert_trains_alike
from tests.common.native_cache import needs_compiler
from vil.layers.attention import build_attention
from vil.layers.block import Block
from vil.ops.dispatch import CHOICES
from vil.ops.linear import linear, linear_native, linear_torch, pack_weight
from vil.ops.linear_case import (
    MLP,
    NAMES,
    NORM_LINEAR,
    LinearCase,
    by_rule,
    choose,
    is_packed_native,
)
from vil.ops.mlp import SAVED_DIM, MlpWeights, norm_mlp, norm_mlp_native, norm_mlp_torch
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
CASE = LinearCase("norm linear residual", 301, 48, 80)
MLP_CASE = replace(CASE, kind=MLP, features=192)


def results(backend, case, tensors, dtype=None):
    """Return {name: output, or gradient of x, a weight or the residual}."""
    x, weights, cotangent = tensors
    leaves = {name: t.detach().to(dtype or t.dtype) for name, t in {"x": x, **weights}.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    x, *rest = leaves.values()
    out = linear_tuner.backends(case)[backend](x, dict(zip(weights, rest)))
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))
    return dict(zip(("out", *leaves), (out.detach(), *grads)))


def assert_as_exact_as_torch(case, tensors=None, dtype=None, autocast=False):
    """Compare with float64, by the error that torch's operators make."""
    tensors = tensors or make_tensors(case)
    exact = results("torch", case, tensors, torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = results("torch", case, tensors, dtype)
        found = results("native", case, tensors, dtype)
    for name, right in exact.items():
        near, value = plain[name], found[name]
        assert (value.dtype, value.shape) == (near.dtype, near.shape), name
        eps = torch.finfo(torch.bfloat16 if autocast else near.dtype).eps
        bound = 4 * (near - right).abs().max() + 4 * eps * right.abs().max()
        assert (value - right).abs().max() <= bound, name


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "threads"),  # tokens of one task and several
    [(1, 2), (15, 1), (16, 8), (257, 2), (1003, 1), (1003, 8)],
    indirect=["threads"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NAMES)
def test_it_equals_torch_on_any_number_of_threads(kind, dtype, tokens, threads):
    assert_as_exact_as_torch(replace(CASE, kind=kind, tokens=tokens), dtype=dtype)


@needs_compiler
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (208, 400)], ids=str)
@pytest.mark.parametrize("autocast", [False, *[True] * len(HALVES)])
@pytest.mark.parametrize("kind", NAMES)
def test_it_equals_torch_on_other_widths(kind, sizes, autocast):
    assert_as_exact_as_torch(LinearCase(kind, 77, *sizes), autocast=autocast)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_equal_activations_stay_finite(dtype):
    """GELU far out is its input or 0, and the norm of equal channels is its shift."""
    x, weights, cotangent = make_tensors(replace(MLP_CASE, tokens=40))
    x = torch.cat([x[:20] * 1e4, torch.full_like(x[20:], 3.0)]).detach()
    weights["gain"] = weights["gain"].detach() * 1e3
    assert_as_exact_as_torch(MLP_CASE, (x, weights, cotangent), dtype)


@needs_compiler
def test_an_mlp_without_its_residual():
    x, weights, cotangent = make_tensors(MLP_CASE)
    found = []
    for compute in (norm_mlp_native, norm_mlp_torch):
        out = compute(x, MlpWeights(**weights), eps=1e-6)
        found.append([out, *torch.autograd.grad(out, (x, *weights.values()), cotangent)])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_show(value):
    x, weights, _ = make_tensors(replace(MLP_CASE, needs_grad=False))
    x[7, 3] = value
    out = norm_mlp_native(x, MlpWeights(**weights), eps=1e-6)
    assert out[7].isnan().all()
    assert out[torch.arange(len(out)) != 7].isfinite().all()


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
@pytest.mark.parametrize("sizes", [(5001, 48, 80), (90, 208, 400)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NAMES)
def test_results_repeat_bit_for_bit_on_any_number_of_threads(kind, dtype, sizes):
    case, found, before = LinearCase(kind, *sizes, dtype), [], torch.get_num_threads()
    tensors = make_tensors(case)
    for threads in (2, 2, 1, 3):
        torch.set_num_threads(threads)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found.append(results("native", case, tensors))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


@needs_compiler
def test_inputs_may_have_any_strides_and_leading_dimensions():
    x, w, residual = torch.randn(3, 20, 48), torch.randn(48, 32).T, torch.randn(20, 3, 32)
    found = linear_native(x.transpose(0, 1), w, residual=residual)
    torch.testing.assert_close(found, linear_torch(x.transpose(0, 1), w, residual=residual))
    weights = MlpWeights(**make_tensors(replace(MLP_CASE, needs_grad=False))[1])
    found, wanted = (
        compute(x.transpose(0, 1), weights, eps=1e-6)
        for compute in (norm_mlp_native, norm_mlp_torch)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert linear_native(x[:0], w).shape == (0, 20, 32)
    assert norm_mlp_native(x[:0], weights, eps=1e-6).shape == (0, 20, 48)
    empty = x[:0].requires_grad_()
    weight = w.clone().requires_grad_()
    grads = torch.autograd.grad(linear_native(empty, weight).sum(), (empty, weight))
    assert grads[0].shape == (0, 20, 48)
    assert not grads[1].any()


@needs_compiler
@pytest.mark.parametrize(
    ("case", "needed"),
    [
        *((CASE, name) for name in ("x", "gain", "shift", "weight", "bias", "residual")),
        (MLP_CASE, "x"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_one_gradient_alone(case, needed):
    x, weights, cotangent = make_tensors(replace(case, needs_grad=False))
    tensors = {"x": x, **weights}
    tensors[needed].requires_grad_()
    wanted, found = (
        torch.autograd.grad(compute(x, weights), tensors[needed], cotangent)[0]
        for compute in linear_tuner.backends(case).values()
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
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(pack_weight(weight, half=False), packed)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_compiler
@pytest.mark.parametrize(("kind", "name"), [(NORM_LINEAR, "weight"), (MLP, "weight1")])
def test_the_second_derivative_is_that_of_torch(kind, name):
    case = LinearCase(kind, 9, 16, 32)
    x, weights, cotangent = make_tensors(case)
    second = []
    for compute in linear_tuner.backends(case).values():
        (first,) = torch.autograd.grad(compute(x, weights), x, cotangent, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), weights[name])[0])
    torch.testing.assert_close(*second)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dim", "repeated"),
    [*((kind, 48, 0) for kind in NAMES if kind != MLP), (MLP, 48, 1), (MLP, SAVED_DIM, 0)],
)
def test_its_multiplications_are_counted(kind, dim, repeated):
    """repeated: matmuls of the forward pass that an MLP of few channels repeats in backward."""
    case = replace(CASE, kind=kind, tokens=10, dim=dim)
    x, weights, cotangent = make_tensors(case)
    counts = []
    for compute in linear_tuner.backends(case).values():
        with FlopCounterMode(display=False) as counter:
            out = compute(x, weights)
            forward = counter.get_total_flops()
            torch.autograd.grad(out, (x, *weights.values()), cotangent)
        counts.append((forward, counter.get_total_flops() - forward))
    (forward, backward), (native_forward, native_backward) = counts
    assert native_forward == forward > 0
    assert native_backward == backward + repeated * forward / 2


def test_it_says_what_it_cannot_compute():
    reasons = {
        "it needs a CPU, not cuda": replace(MLP_CASE, device="cuda"),
        "not in float16": replace(MLP_CASE, dtype=torch.float16),
        "channels must be multiples of 16": replace(MLP_CASE, dim=50),
    }
    for reason, case in reasons.items():
        assert any(reason in text for text in case.unsupported())
        CHOICES[case.bucket()] = "native"
        assert choose(case) == "torch"


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [CASE.kind, MLP])
def test_tuning_stores_the_faster_backend(kind, dtype):
    case = replace(CASE, kind=kind, dtype=dtype)
    trials = tune_linear(case, rounds=1)
    assert {trial.name for trial in trials if not trial.reason} == {"torch", "native"}
    assert {case.bucket(): trials[0].name} == CHOICES
    assert trials[0].seconds <= trials[1].seconds
    CHOICES[case.bucket()] = other = {"torch": "native", "native": "torch"}[by_rule(case)]
    similar = replace(case, tokens=400)
    assert choose(similar) == other, "the next power of two is the same"
    for different in (replace(case, tokens=600), replace(case, needs_grad=False)):
        assert choose(different) == by_rule(different)


@needs_compiler
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((CASE, name) for name in ("gain", "weight", "residual")),
        *((MLP_CASE, name) for name in ("shift", "bias2", "weight1")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_tuning_rejects_a_wrong_gradient(case, name, monkeypatch):
    right = linear_tuner.backends(case)

    def wrong(x, weights):
        changed = weights[name] + 0.01 * (weights[name] - weights[name].detach())
        return right["native"](x, {**weights, name: changed})

    monkeypatch.setattr(linear_tuner, "backends", lambda case: {**right, "native": wrong})
    assert f"wrong: d{name} is off by" in reason_against_native(case)
    trials = {trial.name: trial for trial in tune_linear(case, rounds=1)}
    assert "wrong" in trials["native"].reason
    assert CHOICES[case.bucket()] == "torch"


# --- in a block


@pytest.fixture(params=["longformer", "full"])
def block(request):
    torch.manual_seed(0)
    window = {"window": 3} if request.param == "longformer" else {}
    return Block(build_attention(request.param, dim=48, num_heads=3, **window)).eval()


@pytest.fixture
def calls(monkeypatch):
    """Let `native` be chosen for every layer, and list its calls."""
    found = []

    def counted(operator, x, *args):
        parts = {"norm": args[0], "residual": args[4]}
        found.append(" ".join(name for name, part in parts.items() if part is not None) or "alone")
        return call_operator(operator, x, *args)

    def counted_mlp(operator, x, *args):
        found.append("mlp")
        return call_operator(operator, x, *args)

    CHOICES["any"] = "native"
    monkeypatch.setattr("vil.ops.linear_case.choose", lambda case: CHOICES.get("any", "torch"))
    monkeypatch.setattr("vil.ops.linear.call_operator", counted)
    monkeypatch.setattr("vil.ops.mlp.call_operator", counted_mlp)
    return found


@needs_compiler
def test_a_block_is_computed_by_three_calls(block, calls):
    x = torch.randn(2, 17, 48)
    found, branch = block(x, (4, 4)), block.attn_branch(x, (4, 4))
    assert calls == ["norm", "residual", "mlp", "norm", "alone"]
    CHOICES.clear()
    torch.testing.assert_close(found, block(x, (4, 4)))
    torch.testing.assert_close(branch, block.attn_branch(x, (4, 4)))
    assert len(calls) == 5


@needs_compiler
@pytest.mark.parametrize("drop_path", [0.5, nn.Threshold(0.0, 0.0)], ids=["rate", "module"])
def test_stochastic_depth_comes_before_the_residual(drop_path, calls):
    rate = drop_path if isinstance(drop_path, float) else 0.0
    block = Block(build_attention("full", dim=48, num_heads=3), drop_path=rate).train()
    if not rate:
        block.drop_path = drop_path
    x = torch.randn(2, 17, 48)
    torch.manual_seed(1)
    found = block(x, (4, 4))
    assert calls == ["norm", "alone", "mlp"]
    CHOICES.clear()
    torch.manual_seed(1)
    torch.testing.assert_close(found, block(x, (4, 4)))


def replace_forward(module):
    before = module.forward
    module.forward = lambda *args: 2 * before(*args)


def override_forward(module):
    cls = type(module)
    forward = {"forward": lambda self, *args: 2 * cls.forward(self, *args)}
    module.__class__ = type("Own", (cls,), forward)


def add_dropout(block):
    block.attn.proj_drop.p = 0.5
    block.train()


def set_to(name, make):
    return lambda block: setattr(block.get_submodule(name.rpartition(".")[0]),
                                 name.rpartition(".")[2], make())  # fmt: skip


class Lora(nn.Linear):
    """A subclass of a linear layer may compute anything."""


IN_ATTENTION = {
    "a hook of the norm": lambda b: b.norm1.register_forward_pre_hook(lambda m, x: (x[0] + 1,)),
    "a hook of the attention": lambda b: b.attn.register_forward_hook(lambda m, x, out: 2 * out),
    "a hook of a layer": lambda b: b.attn.proj.register_full_backward_hook(lambda *args: None),
    "another norm": set_to("norm1", nn.Identity),
    "another layer": set_to("attn.proj", lambda: Lora(48, 48)),
    "a subclass": lambda b: override_forward(b.attn),
    "a replaced forward": lambda b: replace_forward(b.attn),
    "a replaced forward of a layer": lambda b: replace_forward(b.attn.proj),
    "dropout": add_dropout,
}
IN_MLP = {
    "a hook of the second norm": (
        lambda b: b.norm2.register_forward_pre_hook(lambda m, x: (x[0] + 1,))
    ),
    "a hook of fc2": lambda b: b.mlp.fc2.register_forward_hook(lambda m, x, out: 2 * out),
    "another activation": set_to("mlp.act", nn.ReLU),
    "another gelu": set_to("mlp.act", lambda: nn.GELU("tanh")),
    "another fc1": set_to("mlp.fc1", lambda: Lora(48, 192)),
    "another second norm": set_to("norm2", nn.Identity),
    "no bias": set_to("mlp.fc1", lambda: nn.Linear(48, 192, bias=False)),
}


@needs_compiler
@pytest.mark.parametrize("change", [*IN_ATTENTION, *IN_MLP])
def test_modules_that_do_something_else_are_called(block, calls, change):
    (IN_ATTENTION | IN_MLP)[change](block)
    x = torch.randn(1, 5, 48)
    torch.manual_seed(1)
    found = block(x, (2, 2))
    assert ("norm" in calls) == (change in IN_MLP)
    assert ("mlp" in calls) == (change in IN_ATTENTION)
    CHOICES.clear()
    torch.manual_seed(1)
    wanted = x + block.attn(block.norm1(x), (2, 2))
    torch.testing.assert_close(found, wanted + block.mlp(block.norm2(wanted)))


@needs_compiler
def test_padding_is_hidden_after_the_norm(block, calls):
    x = torch.randn(1, 17, 48)
    valid = torch.tensor([[3, 4]])
    x[0, 13:] = float("nan")
    assert block(x, (4, 4), valid)[0, :13].isfinite().all()
    assert "norm" not in calls


def test_other_devices_use_the_modules(block, calls):
    meta = block.to("meta")
    assert meta(torch.empty(2, 17, 48, device="meta"), (4, 4)).shape == (2, 17, 48)
    assert not calls


@needs_compiler
@pytest.mark.parametrize("kind", ["linear", MLP])
def test_tools_that_trace_see_the_operators_of_torch(kind, block, calls):
    x = torch.randn(2, 17, 48)
    if kind == MLP:
        _, weights, _ = make_tensors(replace(MLP_CASE, needs_grad=False))
        weights = MlpWeights(**weights)
        wanted = norm_mlp_torch(x, weights, eps=1e-6)
        assert_traced_alike(lambda x: norm_mlp(x, weights, eps=1e-6), x, wanted)
    else:
        weight, bias = (t.detach() for t in block.attn.proj.parameters())
        wanted = nn.functional.linear(x, weight, bias)
        assert_traced_alike(lambda x: linear(x, weight, bias), x, wanted)
        graph = str(torch.export.export(block, (x, (4, 4))).graph)
        assert "vil.linear" not in graph
        assert "norm_mlp" not in graph
    assert not calls


@needs_compiler
def test_a_model_trains_alike(calls):
    assert_trains_alike()
    assert {"norm", "residual", "mlp"} <= {*calls}


# --- selection without tuning


@needs_compiler
@pytest.mark.parametrize("phase", ["training", "evaluation", "optimized for inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("amd", [False, True], ids=["other", "amd"])
def test_the_rule_depends_on_tokens_and_channels(amd, kind, dtype, phase, monkeypatch):
    monkeypatch.setattr(library, "_is_amd", lambda: amd)
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
    monkeypatch.setattr(library, "prepare", lambda: pytest.fail("loaded"))
    assert choose(LinearCase(NORM_LINEAR, 10, 1536, 1536)) == "torch"
    assert not is_packed_native(NORM_LINEAR, 1536, 1536, torch.float32)
