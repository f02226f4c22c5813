"""A block in one call of the compiled code: the same outputs, whatever is changed between calls."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import vil
from tests.common.native_cache import needs_compiler
from vil.layers.block import Block, build_block
from vil.ops.block import block as block_operation
from vil.ops.dispatch import CHOICES, DEFAULT
from vil.ops.linear_case import CHANNELS_UNIT
from vil.ops.native import library

pytestmark = needs_compiler
GRID, DIM = (20, 20), 4 * CHANNELS_UNIT
FULL = dict(attention="full", dim=DIM, num_heads=4, num_global=1)
LOCAL = dict(attention="longformer", dim=DIM, num_heads=4, num_global=2, window=7)
AXIAL = dict(attention="pattern", dim=DIM, num_heads=4, num_global=1, pattern="axial")
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]


@pytest.fixture
def calls(monkeypatch):
    """The calls of the compiled block. Linear layers and MLPs are native for all shapes."""
    counted = []
    run = lambda *args, **options: counted.append(args) or block_operation(*args, **options)  # noqa: E731
    monkeypatch.setattr("vil.layers.fused_block.block", run)
    monkeypatch.setattr("vil.ops.linear_case._by_rule", lambda *_: "native")
    return counted


def make_block(fields) -> Block:
    torch.manual_seed(0)
    block = build_block({"grid": GRID, **fields}).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    return block


def tokens_of(block, batch=2):
    torch.manual_seed(1)
    return torch.randn(batch, block.attn.num_global + GRID[0] * GRID[1], DIM)


def ordinary(block, x):
    """Return the output of the block, computed in four calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vil.layers.block.fused_block", lambda *_: None)
        return block(x, GRID)


@torch.no_grad()
@pytest.mark.parametrize("half", [False, True][: len(DTYPES)], ids=["float32", "autocast"])
@pytest.mark.parametrize("fields", [FULL, {**FULL, "qkv_bias": False}, LOCAL, AXIAL])
def test_the_output_is_that_of_four_calls(calls, half, fields):
    block = make_block(fields)
    for batch in (1, 3):
        x = tokens_of(block, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            assert torch.equal(block(x, GRID), ordinary(block, x))
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fields", [FULL, LOCAL, {**LOCAL, "sw_exact": -1}, {**LOCAL, "mode": -1}, AXIAL]
)
def test_the_output_of_packed_weights_is_that_of_four_calls(calls, dtype, fields):
    block = vil.optimize_for_inference(make_block(fields), dtype=dtype).model
    x = tokens_of(block).to(dtype)
    for _ in range(2):
        assert torch.equal(block(x, GRID), ordinary(block, x))
    other = copy.deepcopy(block)
    assert torch.equal(other(x, GRID), ordinary(block, x))
    assert len(calls) == 3


def replace_weight(block):
    layer = getattr(block.attn, block.attn.projections[0])
    layer.weight = nn.Parameter(layer.weight * 2)


def replace_data(block):
    block.mlp.fc2.weight.data = block.mlp.fc2.weight.data * 2


def replace_method(block):
    block.attn.attend_qkv = lambda qkv, grid: 2 * qkv[..., :DIM]


def swap_class(block):
    block.attn.proj.__class__ = type("Twice", (nn.Linear,), {"forward": lambda self, x: 2 * x})


def transpose(block):
    weight = block.attn.proj.weight
    weight.data = weight.data.t()


CHANGES = {
    "a parameter in place": lambda block: block.attn.proj.weight.mul_(2),
    "the first weights in place": lambda block: [
        getattr(block.attn, name).weight.mul_(2) for name in block.attn.projections
    ],
    "the weights loaded": lambda block: block.load_state_dict(
        {name: 2 * value for name, value in block.state_dict().items()}
    ),
    "a parameter": replace_weight,
    "its memory": replace_data,
    "its strides": transpose,
    "no bias": lambda block: setattr(block.attn.proj, "bias", None),
    "a module": lambda block: setattr(block, "norm1", nn.LayerNorm(DIM, eps=0.1)),
    "an activation": lambda block: setattr(block.mlp, "act", nn.ReLU()),
    "a faster activation": lambda block: setattr(block.mlp.act, "approximate", "tanh"),
    "the epsilon": lambda block: setattr(block.norm2, "eps", 1.0),
    "the scale": lambda block: setattr(block.attn, "scale", 1.0),
    "the heads": lambda block: setattr(block.attn, "num_heads", 2),
    "a method": replace_method,
    "a class": swap_class,
    "the dtype": lambda block: block.attn.half(),
    "a method of the MLP": lambda block: setattr(block.mlp, "forward", lambda x: 2 * x),
    "a hook of fc1": lambda block: block.mlp.fc1.register_forward_hook(lambda *args: 2 * args[2]),
    "a hook before attention": lambda block: block.attn.register_forward_pre_hook(
        lambda module, args: (2 * args[0], *args[1:])
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("fields", [FULL, LOCAL], ids=["full", "local"])
def test_a_change_between_calls_has_its_effect(calls, fields, what):
    block = make_block(fields)
    x = tokens_of(block)
    before = block(x, GRID)
    assert len(calls) == 1
    CHANGES[what](block)
    expected = ordinary(block, x)
    assert torch.equal(block(x, GRID), expected)
    assert not torch.equal(expected, before)


def test_what_must_see_the_layers_does(calls, monkeypatch):
    block = make_block(FULL)
    x = tokens_of(block)
    assert block(x, GRID).requires_grad
    with torch.no_grad():
        block(x.mT.contiguous().mT, GRID)  # other strides
        block(x[:0], GRID)
        with torch.profiler.profile():
            block(x, GRID)
        assert "vil" not in str(torch.export.export(block, (x, GRID)).graph)
        torch.func.vmap(lambda tokens: block(tokens[None], GRID)[0])(x)
        monkeypatch.setitem(CHOICES, DEFAULT, "")  # a run that began before this backend
        block(x, GRID)
        block.train().mlp.drop1.p = 0.5
        block(x, GRID)
    assert not calls


@torch.no_grad()
def test_tangents_of_weights_are_kept(calls):
    block = make_block(FULL)
    weights = {name: tensor.detach() for name, tensor in block.named_parameters()}
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, x) for name, x in weights.items()}
        out = torch.func.functional_call(block, duals, (tokens_of(block), GRID))
        assert forward_ad.unpack_dual(out).tangent is not None
    assert not calls


@torch.no_grad()
def test_tokens_of_another_width_are_refused(calls):
    block = make_block(FULL)
    with pytest.raises(ValueError, match=r"needs a gain of shape \(32,\), got \(64,\)"):
        block(torch.randn(1, 401, DIM // 2), GRID)
