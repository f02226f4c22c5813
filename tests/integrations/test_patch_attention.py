"""Patched timm vision transformers: equal to timm's if the window covers the grid, else equal to
timm's attention under the mask of the reference implementation.
"""

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import vil
from vil.integrations.timm_attention import PatchedAttention
from vil.layers.attention import set_progress
from vil.ops import Window
from vil.ops.reference import attended_keys
from vil.utils.train_step import TrainStep

PAGE = Path(__file__).parent.parent.parent / "docs/guides/patch_attention.md"
FEW = dict(img_size=96, embed_dim=32, depth=2, num_heads=2, num_classes=5)  # 6x6 patches
vit, eva = partial(VisionTransformer, **FEW), partial(Eva, **FEW, head_init_scale=1.0)


def custom_attention(**settings) -> nn.Module:
    """Build a model with attentions that timm's constructor does not: gates, narrow heads."""
    model = vit()
    for block in model.blocks:
        block.attn = Attention(32, 2, **settings)
    return model


MODELS = {
    "one class token": partial(vit, init_values=1e-5),
    "four registers": partial(vit, reg_tokens=4, no_embed_class=True),
    "no prefix token": partial(vit, class_token=False, global_pool="avg", qkv_bias=False),
    "attention pooling": partial(vit, class_token=False, global_pool="map"),
    "normed q, k and rows": partial(vit, qk_norm=True, scale_attn_norm=True),
    "norm after": partial(timm.create_model, "vit_small_patch16_36x1_224", **FEW),
    "two attentions a block": partial(timm.create_model, "vit_small_patch16_18x2_224", **FEW),
    "distillation token": partial(timm.create_model, "deit_tiny_distilled_patch16_224", **FEW),
    "gated": partial(custom_attention, gated=True, qkv_bias=True),
    "narrow heads": partial(custom_attention, attn_head_dim=8, qkv_bias=True),
    "any size": partial(vit, dynamic_img_size=True),
    "rotary, biases apart": partial(eva, use_rot_pos_emb=True),
    "rotary, few keys": partial(
        eva, use_rot_pos_emb=True, attn_type="rope", qkv_fused=False, num_kv_heads=1, qk_norm=True
    ),
    "rotary, of each block": partial(eva, use_rot_pos_emb=True, rope_type="mixed"),
    "rotary, registers": partial(
        eva, use_rot_pos_emb=True, num_reg_tokens=3, scale_attn_inner=True, attn_type="rope"
    ),
}


def randomize(model: nn.Module) -> nn.Module:
    """Make every parameter matter: larger LayerScale, random norms, scores that vary by key."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("gamma", "gamma_1", "gamma_2")):
                weight.uniform_(0.5, 1.5)
            else:
                size = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.2
                weight.add_(torch.randn_like(weight) * size)
    return model.eval()


def patched(model: nn.Module, *args, **kwargs) -> nn.Module:
    """Return a patched copy."""
    return vil.patch_attention(copy.deepcopy(model), *args, **kwargs)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, other: nn.Module, images: Tensor, masked: Tensor | None = None):
    """Compare logits (to 1e-5) and gradients. masked: attention mask for `model`."""
    some = {} if masked is None else {"attn_mask": masked}
    logits, others = model(images, **some), other(images)
    assert logits.std() > 0.05
    assert (logits - others).abs().max() < 1e-5
    want, got = (gradients(m, x.square().sum()) for m, x in ((model, logits), (other, others)))
    assert want.keys() == got.keys()
    least = 0.01 * max(grad.abs().max() for grad in want.values())  # some are zero up to rounding
    for name, grad in want.items():
        assert (grad - got[name]).abs().max() <= 1e-4 * grad.abs().max().clamp(min=least), name


def mask(window: Window, num_prefix: int) -> Tensor:
    """Return the reference mask (T, T): prefix tokens attend to and are attended by all."""
    found = torch.ones(num_prefix + window.length, num_prefix + window.length, dtype=torch.bool)
    found[num_prefix:, num_prefix:] = False
    for number in range(window.length):
        for row, col, _ in attended_keys(window, *divmod(number, window.grid[1])):
            found[num_prefix + number, num_prefix + row * window.grid[1] + col] = True
    return found


def test_a_window_over_the_grid_changes_nothing():
    model = randomize(timm.create_model("vit_tiny_patch16_224"))
    images = torch.randn(1, 3, 224, 224)
    assert_same(model, patched(model, window=14), images)
    seven = patched(model)  # two chunks a side: every chunk sees every other
    assert (seven(images) - model(images)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_a_window_over_the_grid_changes_nothing_in_any_variant(kind):
    model = randomize(MODELS[kind]())
    other = patched(model, window=9)
    assert sum(isinstance(m, PatchedAttention) for m in other.modules()) >= 2
    assert_same(model, other, torch.randn(2, 3, 96, 96))


@pytest.mark.parametrize("kind", ["one class token", "four registers", "no prefix token"])
@pytest.mark.parametrize(
    "own", [dict(window=1), dict(window=2, sw_exact=1), dict(window=4, mode=-1),
            dict(window=1, sw_exact=-1), dict(window=1, backend="chunk_autograd")], ids=str
)  # fmt: skip
def test_a_narrow_window_is_timm_s_attention_under_the_mask(kind, own):
    model = randomize(MODELS[kind]())
    window = Window.from_mode((6, 6), own["window"], own.get("sw_exact", 0), own.get("mode", 0))
    seen = mask(window, model.num_prefix_tokens)
    assert not seen.all()
    images = torch.randn(2, 3, 96, 96)
    assert_same(model, patched(model, **own), images, seen)
    assert (model(images) - patched(model, **own)(images)).abs().max() > 1e-2


def test_global_attention_is_timm_s_attention_under_the_mask():
    model = randomize(MODELS["four registers"]())
    assert model.num_prefix_tokens == 5
    seen = torch.zeros(41, 41, dtype=torch.bool)
    seen[:5] = seen[:, :5] = True
    assert_same(model, patched(model, "global"), torch.randn(2, 3, 96, 96), seen)


@pytest.mark.parametrize("size", [(48, 112), (112, 48), (16, 16), (96, 96)], ids=str)
def test_the_grid_follows_dynamic_image_sizes(size):
    model = randomize(MODELS["any size"]())
    other = patched(model, window=2)
    other(torch.randn(1, 3, 64, 32))  # another grid before
    seen = mask(Window((size[0] // 16, size[1] // 16), 2), 1)
    assert_same(model, other, torch.randn(2, 3, *size), seen)


def test_the_grid_follows_set_input_size_and_padding():
    model = randomize(vit())
    other = patched(model, window=2)
    for one in (model, other):
        one.set_input_size(img_size=(48, 80))
    assert_same(model, other, torch.randn(1, 3, 48, 80), mask(Window((3, 5), 2), 1))
    model = randomize(vit(dynamic_img_size=True, dynamic_img_pad=True))
    seen = mask(Window((3, 6), 2), 1)
    assert_same(model, patched(model, window=2), torch.randn(1, 3, 47, 81), seen)


def test_other_forward_methods():
    model = randomize(MODELS["any size"]())
    other, images = patched(model, window=6), torch.randn(1, 3, 64, 96)
    assert torch.allclose(model.forward_features(images), other.forward_features(images), atol=1e-5)
    for x, y in zip(*(m.forward_intermediates(images)[1] for m in (model, other))):
        assert torch.allclose(x, y, atol=1e-5)
    maps = timm.create_model("test_vit", features_only=True, img_size=64)
    with pytest.raises(ValueError, match=r"its submodule model \(VisionTransformer\) has the"):
        vil.patch_attention(maps)
    before = maps(images)
    vil.patch_attention(maps.model, window=6)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(before, maps(images)))


@pytest.mark.parametrize("kind", ["four registers", "gated", "rotary, biases apart"])
def test_state_dicts_and_parameters_do_not_change(kind):
    model = randomize(MODELS[kind]())
    before = {name: id(p) for name, p in model.named_parameters()}
    names = list(model.state_dict())
    assert vil.patch_attention(model, window=2) is model
    assert list(model.state_dict()) == names
    assert {name: id(p) for name, p in model.named_parameters()} == before
    fresh = MODELS[kind]().eval()
    fresh.load_state_dict(model.state_dict(), strict=True)
    vil.patch_attention(fresh, window=2).load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(1, 3, 96, 96)
    assert torch.equal(fresh(images), model(images))


def test_full_restores_timm_s_modules_with_current_weights():
    model = randomize(eva(use_rot_pos_emb=True))
    plain = [block.attn for block in model.blocks]
    vil.patch_attention(model, window=2)
    model.double()
    model.blocks[0].attn.proj = nn.Linear(32, 32, dtype=torch.double)
    proj = model.blocks[0].attn.proj
    model.train()
    vil.patch_attention(model, "full")
    assert [block.attn for block in model.blocks] == plain
    assert plain[0].proj is proj
    assert plain[0].training
    assert plain[0].k_bias.dtype == torch.double
    assert not model.patch_embed._forward_hooks
    assert model(torch.randn(1, 3, 96, 96).double()).dtype == torch.double


def test_patching_again_and_partially():
    model = randomize(vit(depth=4))
    vil.patch_attention(model, window=2)
    vil.patch_attention(model, "full", blocks=[-1, 1])
    vil.patch_attention(model, window=3, blocks=2)
    kinds = [type(block.attn) is Attention for block in model.blocks]
    assert kinds == [False, True, False, True]
    assert [model.blocks[i].attn.window_size for i in (0, 2)] == [2, 3]
    assert len(model.patch_embed._forward_hooks) == 1
    once = patched(randomize(vit(depth=4)), window=2, blocks=range(0, 3, 2))
    once.load_state_dict(model.state_dict())
    vil.patch_attention(once, window=3, blocks=[2])
    images = torch.randn(1, 3, 96, 96)
    assert torch.equal(once(images), model(images))


def test_copies_are_independent():
    model = patched(randomize(MODELS["any size"]()), window=2)
    wide, high = torch.randn(1, 3, 48, 96), torch.randn(1, 3, 96, 48)
    want = model(wide)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(high)
        assert torch.equal(model(wide), want)
        assert torch.equal(twin(wide), want)
        assert twin.blocks[0].attn.grid.size == (3, 6)
        twin(high)
        assert model.blocks[0].attn.grid.size == (3, 6)
        vil.patch_attention(twin, "full")
        assert not twin.patch_embed._forward_hooks
        assert model.patch_embed._forward_hooks


def test_threads_with_other_grids():
    """Each of two threads runs the patch embedding before the other one runs the blocks."""
    model = patched(randomize(MODELS["any size"]()), window=2)
    images = torch.randn(1, 3, 48, 96), torch.randn(1, 3, 96, 48)
    want = [model(each) for each in images]
    both = threading.Barrier(2)
    model.patch_embed.register_forward_hook(lambda module, args, tokens: (both.wait(60), tokens)[1])
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(model, images))
    assert all(torch.equal(*pair) for pair in zip(want, got))


def step(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return gradients(model, sum(model(images).square().sum() for images in batches))


def test_gradient_checkpointing_uses_the_grid_of_each_pass():
    model = patched(randomize(MODELS["any size"]()), window=2).train()
    again = copy.deepcopy(model)
    again.set_grad_checkpointing()
    wide, small = torch.randn(1, 3, 48, 96), torch.randn(1, 3, 32, 48)
    want, got = step(model, wide, small), step(again, wide, small)
    assert all(torch.equal(want[name], got[name]) for name in want)
    with pytest.raises(
        CheckpointError, match="metadata"
    ):  # transposed grids: an error, not a wrong gradient
        step(again, wide, wide.mT)


def test_random_shift_depends_on_the_step_and_repeats_on_recomputation():
    model = patched(randomize(vit()), window=2, mode=1)
    images, nine = torch.randn(1, 3, 96, 96), patched(randomize(vit()), window=2)
    model.load_state_dict(nine.state_dict())
    assert torch.equal(model(images), nine(images))  # evaluation attends to all nine chunks
    model.train()
    with pytest.raises(RuntimeError, match="set_progress"):
        model(images)
    again = copy.deepcopy(model)
    again.set_grad_checkpointing()
    seen = []
    for number in range(4):
        for one in (model, again):
            set_progress(one, TrainStep(step=number, steps_per_epoch=4))
        seen.append(tuple(block.attn.current_mode() for block in model.blocks))
        want, got = step(model, images), step(again, images)
        assert all(torch.equal(want[name], got[name]) for name in want)
    assert len(set(seen)) > 1


def test_dropout_and_settings_are_kept():
    model = randomize(vit(attn_drop_rate=0.5, proj_drop_rate=0.5))
    model.blocks[0].attn.scale = 0.1
    other = patched(model, window=6)
    attn = other.blocks[0].attn
    assert (attn.attn_drop, attn.proj_drop.p, attn.scale) == (0.5, 0.5, 0.1)
    tokens = torch.randn(1, 37, 32)
    attn.proj_drop.p = 0.0
    attn.train()
    assert not torch.equal(attn(tokens), attn(tokens))  # attention dropout only
    attn.eval()
    plain = model.blocks[0].attn
    plain.fused_attn = False  # fused attention ignores scale
    assert torch.allclose(attn(tokens), plain(tokens), atol=1e-5)


@pytest.mark.parametrize("kind", ["normed q, k and rows", "rotary, few keys"])
def test_half_precision(kind):
    model = randomize(MODELS[kind]())
    other, images = patched(model, window=9), torch.randn(2, 3, 96, 96)
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        error, ours = ((m(images).float() - exact).abs().max() for m in (model, other))
        gradients(other, other(images).float().sum())
    assert ours <= 2 * error + 1e-3


@pytest.mark.long
@pytest.mark.parametrize("kind", ["any size", "rotary, registers"])
def test_torch_compile_gives_one_graph(kind):
    model = patched(randomize(MODELS[kind]()), window=2)
    images = torch.randn(1, 3, 96, 96)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    want, got = model(images), compiled(images)
    assert torch.allclose(want, got, atol=1e-6)
    want, got = (gradients(model, x.sum()) for x in (want, got))
    assert all(torch.allclose(want[name], got[name], atol=1e-5) for name in want)


@pytest.mark.slow
def test_torch_export_with_dynamic_sizes():
    model = patched(randomize(MODELS["any size"]()), window=2)
    any_size = torch.export.Dim.AUTO
    exported = torch.export.export(
        model,
        (torch.randn(2, 3, 96, 96),),
        dynamic_shapes=({0: any_size, 2: any_size, 3: any_size},),
    )
    images = torch.randn(5, 3, 48, 112)
    want = copy.deepcopy(model)(images)  # copied after export: no symbolic size remains
    assert torch.allclose(exported.module()(images), want, atol=1e-5)
    assert pickle.dumps(model)


ERRORS = {
    "no transformer": (partial(timm.create_model, "test_resnet"), {}, "ResNet.*lacks blocks"),
    "ours": (partial(vil.get_model, "vil_tiny", img_size=32), {}, "MsViT: it lacks blocks"),
    "wrapped": (lambda: nn.Sequential(vit()), {}, r"submodule 0 \(VisionTransformer\) has the"),
    "swin": (
        partial(timm.create_model, "swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)),
        {}, "SwinTransformer.*lacks blocks.*its layers.0.blocks.0.attn is .*WindowAttention",
    ),
    "a relative bias": (
        partial(timm.create_model, "test_vit_relpos"),
        {}, "VisionTransformerRelPos: blocks.0 .* its blocks.0.attn is .*RelPosAttention",
    ),
    "dropped patches": (partial(vit, patch_drop_rate=0.5), {}, "patch_drop_rate 0.5"),
    "no window": (vit, dict(window=0), "window must be an integer of at least 1, got 0"),
    "a misspelt name": (vit, dict(attention="longfomer"), "did you mean 'longformer'"),
    "one with weights": (vit, dict(attention="linformer"), "longformer, pattern, global, full"),
    "weights apart": (vit, dict(share_weights=False), "unknown argument .*'share_weights'"),
    "full with a window": (vit, dict(attention="full", window=7), "takes no arguments, got window"),
    "no such block": (vit, dict(blocks=[0, 2]), r"no block 2: expected .* 0..1, or -2..-1"),
    "nothing global": (
        partial(vit, class_token=False, global_pool="avg"),
        dict(attention="global"), "at least one global token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_leave_the_model_unchanged(case):
    make, words, message = ERRORS[case]
    model = make()
    before = repr(model)
    with pytest.raises(ValueError, match=message) as error:
        vil.patch_attention(model, **words)
    assert "\n" not in str(error.value)
    assert repr(model) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_masks_and_tokens_off_the_grid_raise():
    model = vil.patch_attention(vit(), window=2)
    with pytest.raises(ValueError, match="supports neither attn_mask nor is_causal"):
        model(torch.randn(1, 3, 96, 96), attn_mask=torch.ones(37, 37, dtype=torch.bool))
    with pytest.raises(ValueError, match="29 patch tokens do not form a grid of 6x6"):
        model.blocks[0](torch.randn(1, 30, 32))


def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:  # each continues the previous one
        exec(compile(block, str(PAGE), "exec"), names)
