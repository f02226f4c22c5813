"""Convert weights: other attentions, numbers of global tokens, sizes; infer models."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import vil
from tests.common.marks import cases
from vil.models.arch import parse_arch
from vil.models.registry import ARCHS
from vil.models.vision_longformer import MsViT
from vil.pretrained.infer_arch import infer_arch
from vil.pretrained.load_weights import get_2021_names, load_weights
from vil.utils.errors import CheckpointError

ARCH = "l1,h1,d8,n1,s1,g1,p4,f2,a{0}_l2,h2,d16,n2,s{1},g{2},p2,f2,a{0}"


def build(absolute=0, sparse=1, num_global=1, attention="longformer", window=2, **settings):
    """Build an MsViT from seed 0."""
    torch.manual_seed(0)
    arch = ARCH.format(absolute, sparse, num_global).replace("f2", f"f{window}")
    stages = parse_arch(arch, attention)
    return MsViT(stages, **{"img_size": 32, "num_classes": 5, **settings})


def original(model) -> dict:
    names = get_2021_names(model)
    return {names[name]: value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("names", ["ours", "the reference's"])
@pytest.mark.parametrize("absolute", [0, 1])
def test_projections_convert_between_full_and_longformer(absolute, names):
    """If the window covers the grid, both give equal results, apart from the relative bias."""
    full, local = build(absolute, 0), build(absolute, 1)
    with torch.no_grad():
        for model in (full, local):
            for name, value in model.named_parameters():
                if "bias_table" in name or "g2" in name:
                    value.zero_()  # differs in size: resizing changes its meaning
    state = full.state_dict() if names == "ours" else original(full)
    with pytest.raises(CheckpointError, match="vil convert converts between full and longformer"):
        load_weights(local, state)
    report = load_weights(local, state, convert=True)
    assert report.complete
    assert len(report.converted) == 2 * 4  # two blocks: weight and bias of query and of kv
    x = torch.randn(2, 3, 32, 32)
    assert_close(local.eval()(x), full.eval()(x), atol=1e-5, rtol=1e-5)

    back = build(absolute, 0)
    report = load_weights(back, local.state_dict(), convert=True)
    assert report.complete
    for name, value in full.state_dict().items():
        if "bias_table" not in name:
            assert torch.equal(back.state_dict()[name], value), name


def test_shared_projections_are_copied_to_separate_ones():
    shared = build()
    separate = build(attention_args={"longformer": {"share_weights": False}})
    report = load_weights(separate, original(shared), convert=True)
    assert report.complete
    attn = separate.stages[0].blocks[0].attn
    assert torch.equal(attn.kv_global.weight, attn.kv.weight)
    assert torch.equal(attn.proj_global.bias, attn.proj.bias)
    x = torch.randn(1, 3, 32, 32)
    assert_close(separate.eval()(x), shared.eval()(x))


@pytest.mark.parametrize("absolute", [0, 1])
def test_one_global_token_is_repeated(absolute):
    one, four = build(absolute, num_global=1), build(absolute, num_global=4)
    with pytest.raises(CheckpointError, match=r"mismatched: .*cls_token \(1, 1, 16\) -> "):
        load_weights(four, one.state_dict())
    report = load_weights(four, one.state_dict(), convert=True)
    assert report.complete
    assert any("cls_token (1, 1, 16) -> (1, 4, 16)" in line for line in report.resized)
    token = four.stages[1].embed.cls_token
    assert torch.equal(token, one.stages[1].embed.cls_token.expand(1, 4, 16))
    with pytest.raises(CheckpointError, match=r"mismatched: .*cls_token \(1, 4, 16\) -> "):
        load_weights(build(absolute, num_global=2), four.state_dict(), convert=True)


def test_extending_keeps_each_distance():
    """In a larger window, known distances keep their bias and new ones get the nearest known."""
    source, larger, back = build(0), build(0, window=3), build(0)
    load_weights(larger, source.state_dict(), rule="extend")
    load_weights(back, larger.state_dict(), rule="extend")
    name = "stages.0.blocks.0.attn.local_relative_position_bias_table"
    small, large = source.state_dict()[name], larger.state_dict()[name]
    side, wide = (math.isqrt(len(table)) for table in (small, large))
    edge, inner = (wide - side) // 2, slice((wide - side) // 2, (wide + side) // 2)
    square = large.unflatten(0, (wide, wide))
    assert edge > 0
    assert torch.equal(square[inner, inner], small.unflatten(0, (side, side)))
    assert torch.equal(square[0, inner], square[edge, inner])
    assert torch.equal(square[inner, -1], square[inner, -1 - edge])
    assert torch.equal(back.state_dict()[name], small)


def test_bicubic_is_antialiased():
    source, target = build(1), build(1, img_size=64)
    report = load_weights(target, source.state_dict(), rule="bicubic")
    assert len(report.resized) == 4
    line = source.stages[0].embed.position.x_pos_embed
    wanted = F.interpolate(line.mT[:, :, None], (1, 16), mode="bicubic", antialias=True)
    assert_close(target.stages[0].embed.position.x_pos_embed, wanted[:, :, 0].mT)

    source, target = build(0, 0), build(0, 0, img_size=48)
    load_weights(target, source.state_dict(), rule="bicubic")
    table = source.stages[1].blocks[0].attn.local_relative_position_bias_table
    image = table.mT.unflatten(1, (7, 7))[None]
    wanted = F.interpolate(image, (11, 11), mode="bicubic", antialias=True)
    found = target.stages[1].blocks[0].attn.local_relative_position_bias_table
    assert_close(found, wanted[0].flatten(1).mT)
    with pytest.raises(ValueError, match=r"unknown rule of resizing 'cubic'.*bicubic"):
        load_weights(target, source.state_dict(), rule="cubic")


def test_tables_are_resized_to_rectangular_grids():
    source, target = build(0, 0), build(0, 0, img_size=(32, 64))
    assert load_weights(target, source.state_dict()).complete
    attn = target.stages[1].blocks[0].attn
    assert len(attn.local_relative_position_bias_table) == 7 * 15


@pytest.mark.parametrize("name", cases(ARCHS, long=[name for name in ARCHS if "tiny" not in name]))
def test_named_models_are_inferred(name):
    """With other classes, size and windows, under either names, from either repository; by the
    tensors' names and shapes alone."""
    windows = [6 if "s1" in part else 7 for part in ARCHS[name].split("_")]
    windows = windows if name.endswith("rpb") else None  # else nothing depends on them
    with torch.device("meta"):
        model = vil.get_model(name, img_size=96, num_classes=3, windows=windows)
    for state in (model.state_dict(), original(model)):
        with torch.device("meta"):
            found, other = infer_arch(state)
        assert found == name
        report = load_weights(other, state)
        assert report.complete
        assert not report.resized
        assert [s.attn_size for s in other.specs] == [s.attn_size for s in model.specs]
    detector = {f"backbone.bottom_up.{k}": v for k, v in original(model).items()}
    with torch.device("meta"):
        assert infer_arch(detector)[0] == name


@pytest.mark.long
def test_a_detector_with_local_attention_only_is_inferred(tmp_path, monkeypatch):
    """Like the published ones: no full attention, no head, cropped positions."""
    monkeypatch.chdir(tmp_path)
    stages = parse_arch(ARCHS["vil_tiny_rpb"].replace("s0", "s1"))
    model = MsViT(stages, img_size=64)
    state = {f"backbone.bottom_up.{k}": v for k, v in original(model).items() if "head" not in k}
    name, found = infer_arch(state)
    assert (name, found.settings["num_classes"]) == ("vil_tiny_rpb", 0)
    assert {kind for spec in found.specs for kind in spec.attention} == {"longformer"}
    assert load_weights(found, state).complete
    vil.save_pretrained(found, "sparse")
    assert json.loads(Path("sparse/config.json").read_text())["architecture"] == "msvit"

    absolute = MsViT(parse_arch(ARCHS["vil_tiny"]), img_size=128, pos_resize="crop").eval()
    state = {f"backbone.bottom_up.{k}": v for k, v in original(absolute).items()}
    _, found = infer_arch(state)
    load_weights(found.eval(), state)
    x = torch.randn(1, 3, 64, 64)
    for ours, wanted in zip(
        found.forward_intermediates(x, intermediates_only=True),
        absolute.forward_intermediates(x, intermediates_only=True),
    ):
        assert_close(ours, wanted)


def test_unknown_models_raise():
    with pytest.raises(CheckpointError, match=r"no built-in model .* The nearest model is vil_\w+"):
        infer_arch(build().state_dict())
