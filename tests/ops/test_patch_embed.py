"""Patch embeddings with packed weights: the same tokens as those of the modules."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vil
from vil.layers.packed_patches import PackedPatchEmbed, can_pack_embed
from vil.layers.patch_embed import PatchEmbed
from vil.layers.pos_embed import AbsoluteEmbedding
from vil.models.stage import to_map
from vil.ops.dispatch import CHOICES
from vil.ops.linear_case import MLP, LinearCase
from vil.ops.native import library
from vil.ops.patch_embed import embed_patches

pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]


def build(in_chans=3, dim=32, patch=4, num_global=1, position=True, norm_eps=1e-6):
    torch.manual_seed(0)
    positions = AbsoluteEmbedding(dim, (5, 6), num_global) if position else None
    embed = PatchEmbed(
        in_chans, dim, patch, num_global=num_global, position=positions, norm_eps=norm_eps, drop=0.1
    )
    for parameter in embed.parameters():
        nn.init.normal_(parameter, std=0.3)
    return embed.eval().requires_grad_(False)


def pack(embed):
    """Return a copy that uses packed weights."""
    packed = copy.deepcopy(embed)
    packed.packed = PackedPatchEmbed(packed)
    return packed


def assert_as_exact_as_modules(embed, inputs):
    """Compare the tokens of some inputs with float64, by the error of the modules."""
    packed, double = pack(embed), copy.deepcopy(embed).double()
    for x in inputs:
        exact, grid = double(x.double())
        near, _ = embed(x)
        found, found_grid = packed(x)
        assert found_grid == grid
        assert (found.dtype, found.shape) == (near.dtype, near.shape)
        bound = 2 * (near - exact).abs().max() + 4 * torch.finfo(x.dtype).eps * exact.abs().max()
        assert (found - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_global=0),
        dict(num_global=3, position=False),
        dict(norm_eps=None),
        dict(in_chans=1),
        dict(in_chans=4, patch=2, dim=208),
        dict(patch=16, dim=16),
    ],
    ids=str,
)
def test_the_tokens_of_images(options, dtype, threads):
    embed = build(**options).to(dtype)
    for size in ((2, 20, 24), (3, 50, 39), (1, 16, 16)):  # another grid, incomplete patches
        x = torch.randn(size[0], options.get("in_chans", 3), *size[1:]).to(dtype)
        layouts = x, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT
        assert_as_exact_as_modules(embed, layouts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", [1, 2, 3])
def test_the_tokens_of_maps(side, dtype, threads):
    embed = build(in_chans=16, patch=side, dim=48).to(dtype)
    tokens = torch.randn(2, 2 + 13 * 11, 16).to(dtype)
    x = to_map(tokens, 2, (13, 11))
    assert_as_exact_as_modules(embed, (x, x.contiguous(), x[:1]))


def test_they_repeat_bit_for_bit():
    packed, x = pack(build()), torch.randn(5, 3, 40, 44)
    first, _ = packed(x)
    assert torch.equal(packed(x)[0], first)
    assert torch.equal(packed(x[3:])[0], first[3:])
    assert packed(x[:0])[0].shape == (0, *first.shape[1:])


def test_other_positions_are_used_after_a_change_of_the_grid():
    embed = build()
    packed, x = pack(embed), torch.randn(2, 3, 28, 32)
    packed(x)
    for each in (embed, packed):
        each.position.set_grid((7, 8), "bicubic")
    torch.testing.assert_close(packed(x)[0], embed(x)[0])
    for each in (embed, packed):
        each.position = None
    torch.testing.assert_close(packed(x)[0], embed(x)[0])


def test_the_operator_checks_the_number_of_tokens():
    embed = pack(build())
    with pytest.raises(ValueError, match=r"expected `added` of shape \(43, 32\), got \(42, 32\)"):
        embed_patches(torch.randn(1, 3, 24, 28), embed.packed.packed, torch.zeros(42, 32), 1)


def test_calls_that_the_compiled_code_does_not_support_use_the_modules(monkeypatch):
    embed = build()
    packed, x = pack(embed), torch.randn(2, 3, 20, 24)
    expected = embed(x)[0]
    torch.testing.assert_close(packed.double()(x.double())[0], embed.double()(x.double())[0])
    packed, embed = packed.float(), embed.float()
    for wrong in (x[0], x[:, :2], x[:, :, :3]):
        messages = []
        for each in (embed, packed):
            with pytest.raises((ValueError, RuntimeError)) as error:
                each(wrong)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    exported = torch.export.export(packed, (x,)).module()
    torch.testing.assert_close(exported(x)[0], expected)
    seen = []
    for part in (packed.proj, packed.norm_embed, packed.position):
        handle = part.register_forward_hook(lambda *args: seen.append(args))
        assert torch.equal(packed(x)[0], expected)
        handle.remove()
    assert len(seen) == 3
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(library, "prepare", lambda: ["no compiler"])
        assert torch.equal(pickle.loads(pickle.dumps(packed))(x)[0], expected)
        elsewhere.undo()
        elsewhere.setattr(library, "has_bfloat16", lambda: False)
        half, x = embed.bfloat16(), x.bfloat16()
        assert torch.equal(pickle.loads(pickle.dumps(pack(half)))(x)[0], half(x)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda embed: setattr(embed, "proj", nn.Conv2d(3, 32, 4, 4, padding=1)),
        lambda embed: setattr(embed, "proj", nn.Conv2d(3, 32, 5, 4)),
        lambda embed: setattr(embed, "proj", nn.Sequential(embed.proj)),
        lambda embed: setattr(embed, "norm_embed", nn.GroupNorm(1, 32)),
        lambda embed: setattr(embed, "norm_embed", nn.LayerNorm(32, bias=False)),
        lambda embed: embed.proj.register_forward_hook(lambda *args: None),
        lambda embed: embed.proj.register_parameter("weight", Scaled(embed.proj.weight)),
    ],
)
def test_changed_modules_are_not_packed(change):
    embed = build()
    assert can_pack_embed(embed)
    change(embed)
    assert not can_pack_embed(embed)


class Scaled(nn.Parameter):
    """A parameter of a subclass."""


def test_other_modules_are_not_packed():
    assert not can_pack_embed(nn.Identity())


def test_other_numbers_of_channels_are_not_packed():
    assert not can_pack_embed(build(dim=40))
    assert not can_pack_embed(build(in_chans=3, patch=2))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_optimized_models_pack_the_stages_with_compiled_mlps(dtype):
    CHOICES[LinearCase(MLP, 2 * 17, 32, 128, dtype, needs_grad=False).bucket()] = "native"
    arch = "l1,h1,d16,n1,s1,g1,p4,f3,a1_l2,h2,d32,n1,s1,g1,p2,f3,a0"
    keys = {"MODEL.VIT.MSVIT.ARCH": arch, "INPUT.IMAGE_SIZE": 32, "DATA.NUM_CLASSES": 5}
    model, x = vil.build_model(None, keys).eval(), torch.randn(2, 3, 32, 32)
    fast = vil.optimize_for_inference(model, dtype=dtype)
    embeds = [stage.embed for stage in fast.model.stages]
    assert [hasattr(embed, "packed") for embed in embeds] == [False, True]
    expected = model.to(dtype)(x.to(dtype)).float()
    atol = (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()
    with FlopCounterMode(display=False) as counter:
        found = fast(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    flops = counter.get_flop_counts()["Global"][torch.ops.vil.embed_patches]
    assert flops == 2 * 2 * 16 * 64 * 32
    for one in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(one(x), found)
