"""Attention maps are the module's weights: times the values and projected, they give its output."""

import pytest
import torch

from vil.layers.attention import ATTENTIONS, build_attention
from vil.models.arch import parse_arch
from vil.models.attention_maps import attention_maps, token_weights
from vil.models.vision_longformer import MsViT
from vil.ops import Window
from vil.ops.reference import attended_keys

pytestmark = pytest.mark.smoke

DIM, HEADS = 12, 3
OWN = {"longformer": {"window": 3}, "performer": {"num_features": 5}, "srformer": {"ratio": 3}}
VALID = torch.tensor([[5, 8], [3, 2]])  # the second image is padded
CASES = {
    **{
        f"longformer exact {exact} mode {mode} {grid[0]}x{grid[1]} g{num_global}": (
            "longformer", grid, num_global, {"sw_exact": exact, "mode": mode},
        )
        for exact, mode in [(1, 0), (0, 0), (-1, 0), (0, -1), (-1, -1), (0, 4), (-1, 4)]
        for grid, num_global in [((5, 8), 1), ((7, 11), 2), ((1, 1), 1), ((4, 4), 0)]
    },
    **{
        f"{name} {grid[0]}x{grid[1]} g{num_global}": (name, grid, num_global, {})
        for name in ATTENTIONS if name not in ("longformer", "linformer")
        for grid, num_global in [((5, 8), 1), ((7, 11), 2), ((1, 1), 1)]
    },
    "separate weights": ("longformer", (5, 8), 2, {"share_weights": False}),
    "separate weights, cyclic": ("longformer", (5, 8), 1, {"share_weights": False, "sw_exact": -1}),
    "global, separate weights": ("global", (5, 8), 2, {"share_weights": False}),
    "srformer, cells dropped": ("srformer", (5, 8), 1, {"ragged": "drop"}),
    "full without globals": ("full", (5, 8), 0, {}),
}  # fmt: skip


def random_module(name, grid, num_global, own, made_for=None):
    """Return a module in float64 with large parameters, and tokens of two images."""
    torch.manual_seed(0)
    rel_pos = ATTENTIONS.load(name).has_relative_bias
    module = build_attention(
        name, dim=DIM, num_heads=HEADS, num_global=num_global, grid=made_for or grid,
        rel_pos=rel_pos, **OWN.get(name, {}), **own,
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    tokens = num_global + grid[0] * grid[1]
    return module, torch.randn(2, tokens, DIM, dtype=torch.float64)


def values(module, x, grid, valid, of_globals):
    """Return the values (B, N, keys, D) by the module's projections."""
    if hasattr(module, "qkv"):
        return module.split_parts(module.qkv(x), 3)[2]
    if hasattr(module, "proj_sr"):
        reduced = module.reduce(x[:, module.num_global :], grid, valid)[0]
        return module.split_parts(module.kv(torch.cat([x[:, : module.num_global], reduced], 1)), 2)[
            1
        ]
    kv = module.kv_global if of_globals and module.separate else module.kv
    return module.split_parts(kv(x), 2)[1]


def projected(module, x, grid, valid, found):
    """Return the module's output, computed from the weights."""
    rows = []
    for of_globals, cut in (
        (True, slice(module.num_global)),
        (False, slice(module.num_global, None)),
    ):
        mixed = found.weights[:, :, cut] @ values(module, x, grid, valid, of_globals)
        separate = of_globals and getattr(module, "separate", False)
        rows.append((module.proj_global if separate else module.proj)(module.merge_heads(mixed)))
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_weights_times_values_are_the_output(case, padded):
    name, grid, num_global, own = CASES[case]
    module, x = random_module(name, grid, num_global, own)
    valid = torch.minimum(VALID, torch.tensor(grid)) if padded else None
    with torch.no_grad():
        found = token_weights(module, x, grid, valid_hw=valid)
        real = module.real_tokens(valid, grid) if padded else ...  # the others have any output
        output = projected(module, x, grid, valid, found)[real]
        torch.testing.assert_close(output, module(x, grid, valid)[real], rtol=0, atol=1e-6)
    assert (found.weights >= 0).all()
    sums = found.weights.sum(-1)
    if num_global == 0 and padded:  # a padding token may attend to nothing
        assert ((sums - 1).abs().lt(1e-9) | sums.eq(0)).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_values_of_padding_change_nothing(case):
    name, grid, num_global, own = CASES[case]
    module, x = random_module(name, grid, num_global, own)
    valid = torch.minimum(VALID, torch.tensor(grid))
    real = module.real_tokens(valid, grid)
    with torch.no_grad():
        zeros, nans = (
            token_weights(module, x.masked_fill(~real[..., None], value), grid, valid_hw=valid)
            for value in (0.0, torch.nan)
        )
    torch.testing.assert_close(nans.weights, zeros.weights)


@pytest.mark.parametrize("exact", [1, 0, -1])
def test_weights_are_zero_outside_the_window(exact):
    grid = (7, 11)
    module, x = random_module("longformer", grid, 1, {"sw_exact": exact})
    found = token_weights(module, x, grid, [1 + 2 * 11 + 9]).weights[0, 0, 0]
    window = Window.from_mode(grid, 3, exact)
    seen = {(row, col) for row, col, _ in attended_keys(window, 2, 9)}
    assert {divmod(k, 11) for k in found[1:].nonzero()[:, 0].tolist()} == seen
    assert len(seen) < 77


# Full models


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    arch = "l1,h3,d12,n2,s1,g2,p4,f3,a0_l2,h2,d16,n1,s0,g1,p2,f3,a0"
    return MsViT(parse_arch(arch, "longformer"), img_size=36, num_classes=3).eval()


def test_weights_are_of_the_block_s_input(model):
    """Not of the embedding: the previous block changes the tokens."""
    images, calls = torch.randn(2, 3, 36, 52), []
    attn = model.stages[0].blocks[1].attn
    hook = attn.register_forward_hook(lambda _, arguments, out: calls.append((arguments, out)))
    with torch.no_grad():
        model(images)
        hook.remove()
        found = attention_maps(model, images, 0, 1)
        (x, grid, valid), out = calls[0]
        torch.testing.assert_close(projected(attn, x, grid, valid, found), out)
    assert found.grid == found.cells == (9, 13)
    assert found.weights.shape == (2, 3, 2 + 9 * 13, 2 + 9 * 13)
    assert attention_maps(model, images, -1, -1).grid == (4, 6)


def test_padding_tokens_have_no_weight(model):
    images, valid = torch.randn(1, 3, 40, 40), torch.tensor([[20, 40]])
    found = attention_maps(model, images, 0, 0, [2], valid).weights
    assert (found[..., 2 + 5 * 10 :] == 0).all()
    assert (attention_maps(model, images, 0, 0, [2]).weights[..., 2 + 5 * 10 :] > 0).any()


@pytest.mark.parametrize(
    ("stage", "block", "queries", "message"),
    [
        (2, 0, None, "no stage with index 2: the model has 2"),
        (0, -3, None, "no block with index -3: the stage has 2"),
        (0, 0, [83], "no token with index 83: the stage has 83 tokens, including the global"),
    ],
)
def test_missing_stage_block_or_query_raises(model, stage, block, queries, message):
    with pytest.raises(ValueError, match=message):
        attention_maps(model, torch.zeros(1, 3, 36, 36), stage, block, queries)
