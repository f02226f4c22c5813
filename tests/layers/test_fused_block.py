"""A block in one call of the compiled code: the same outputs, whatever is changed between calls."""

import copy

import pytest
import torch
from torch import nn

import vil
from tests.common.native_cache import needs_compiler
from vil.layers import fused_block
from vil.layers.block import Block, build_block
from vil.ops.block import BlockCall
from vil.ops.dispatch import CHOICES, DEFAULT
from vil.ops.linear_case import CHANNELS_UNIT
from vil.ops.native import library

pytestmark = needs_compiler
GRID, DIM = (20, 20), 4 * CHANNELS_UNIT
FULL = dict(attention="full", dim=DIM, num_heads=4, num_global=1)
LOCAL = dict(attention="longformer", dim=DIM, num_heads=4, num_global=2, window=7)
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of the compiled block, as the length of a list. Linear layers and MLPs
    are native for all shapes."""
    counted, plain = [], BlockCall.__call__
    run = lambda self, x: counted.append(x) or plain(self, x)  # noqa: E731
    monkeypatch.setattr(BlockCall, "__call__", run)
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
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_that_of_four_calls(calls, half, bias):
    block = make_block({**FULL, "qkv_bias": bias})
    for batch in (1, 3):
        x = tokens_of(block, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            assert torch.equal(block(x, GRID), ordinary(block, x))
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fields", [FULL, LOCAL, {**LOCAL, "sw_exact": -1}, {**LOCAL, "mode": -1}])
def test_the_output_of_packed_weights_is_that_of_four_calls(calls, dtype, fields):
    block = vil.optimize_for_inference(make_block(fields), dtype=dtype).model
    x = tokens_of(block).to(dtype)
    for _ in range(2):
        assert torch.equal(block(x, GRID), ordinary(block, x))
    other = copy.deepcopy(block)
    assert torch.equal(other(x, GRID), ordinary(block, x))
    assert len(calls) == 3


def replace_weight(block):
    block.attn.qkv.weight = nn.Parameter(block.attn.qkv.weight * 2)


def replace_data(block):
    block.mlp.fc2.weight.data = block.mlp.fc2.weight.data * 2


def replace_method(block):
    block.attn.attend_qkv = lambda qkv, grid: 2 * qkv[..., :DIM]


def replace_sdpa(block):
    block.attn.sdpa = lambda q, k, v, *rest: 2 * v


CHANGES = {
    "a parameter in place": lambda block: block.attn.proj.weight.mul_(2),
    "a parameter": replace_weight,
    "its memory": replace_data,
    "a module": lambda block: setattr(block, "norm1", nn.LayerNorm(DIM, eps=0.1)),
    "an activation": lambda block: setattr(block.mlp, "act", nn.ReLU()),
    "the epsilon": lambda block: setattr(block.norm2, "eps", 1.0),
    "the scale": lambda block: setattr(block.attn, "scale", 1.0),
    "the heads": lambda block: setattr(block.attn, "num_heads", 2),
    "a method": replace_method,
    "a method below": replace_sdpa,
    "the dtype": lambda block: block.attn.half(),
    "a method of the MLP": lambda block: setattr(block.mlp, "forward", lambda x: 2 * x),
    "a hook of fc1": lambda block: block.mlp.fc1.register_forward_hook(lambda *args: 2 * args[2]),
    "a hook before attention": lambda block: block.attn.register_forward_pre_hook(
        lambda module, args: (2 * args[0], *args[1:])
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_between_calls_has_its_effect(calls, what):
    block = make_block(FULL)
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
    assert not calls


@torch.no_grad()
def test_tokens_of_another_width_are_refused_as_by_the_layers(calls):
    block = make_block(FULL)
    with pytest.raises((RuntimeError, ValueError)):
        block(torch.randn(1, 401, DIM // 2), GRID)
    assert not calls


def test_plans_end_with_their_block(calls):
    block = make_block(FULL)
    with torch.inference_mode():
        block(tokens_of(block), GRID)
    assert block in fused_block._plans
    count = len(fused_block._plans)
    del block
    assert len(fused_block._plans) == count - 1
