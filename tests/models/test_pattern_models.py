"""Models, blocks and patched models whose attention is a pattern."""

import numpy as np
import pytest
import torch

import vil
from vil.config import get_config
from vil.export.exporter import export_model
from vil.integrations.build import build_network
from vil.layers.attention import FullAttention, PatternAttention
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.ops import patterns
from vil.utils.errors import ConfigError

ARCH = "l1,h2,d8,n3,s1,g1,p4,f3,a0_l2,h2,d8,n2,s1,g0,p2,f2,a0"


def build(pattern: str | patterns.Pattern, attention: str = "pattern", **settings) -> MsViT:
    arguments = {"pattern": {"pattern": pattern}}
    stages = parse_arch(ARCH, attention)
    return MsViT(stages, img_size=28, num_classes=3, attention_args=arguments, **settings)


def texts(model: MsViT) -> list[list[str]]:
    return [
        [str(b.attn.pattern) for b in stage.blocks if isinstance(b.attn, PatternAttention)]
        for stage in model.stages
    ]


def test_patterns_differ_by_stage_and_block():
    model = build("axial; swin:2; local:1 / local:2")
    assert texts(model) == [["axial", "swin:2,0", "local:1,max"], ["local:2,max"] * 2]
    mixed = build("axial; swin:2", "pattern,full,pattern/pattern")
    assert texts(mixed) == [["axial", "swin:2,0"], ["axial", "swin:2,0"]]
    assert isinstance(mixed.stages[0].blocks[1].attn, FullAttention)
    mixed(torch.randn(1, 3, 28, 28)).sum().backward()
    assert all(p.grad is not None for p in mixed.parameters())


def test_a_saved_model_keeps_its_patterns(tmp_path):
    model = build("axial | local:1; random:0.4,3 / swin:2").eval()
    vil.save_pretrained(model, tmp_path)
    again = vil.from_pretrained(tmp_path).eval()
    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(model(x), again(x))
    assert texts(again) == texts(model)


def test_a_table_of_an_unbounded_pattern_is_resized_with_the_image():
    model = build("axial / local:1").double().eval()
    tables = [s.blocks[0].attn.local_relative_position_bias_table for s in model.stages]
    assert [len(table) for table in tables] == [13 * 13, 3 * 3]
    x = torch.randn(1, 3, 36, 44, dtype=torch.float64)
    wanted = model(x)
    model.set_input_size((36, 44))
    tables = [s.blocks[0].attn.local_relative_position_bias_table for s in model.stages]
    assert [len(table) for table in tables] == [17 * 21, 3 * 3]
    assert torch.allclose(model(x), wanted)


def options(**more: object) -> list[str]:
    keys = {"ARCH": ARCH, "ATTN_TYPE": "pattern"} | more
    words = [f"MODEL.VIT.MSVIT.{key}={value}" for key, value in keys.items()]
    return [*words, "INPUT.IMAGE_SIZE=28"]


def test_the_config_selects_pattern_reach_and_backend():
    words = options(PATTERN="axial | local:1 / swin:2", PATTERN_REACH=3, BACKEND="masked")
    cfg = get_config("digits/vil_nano.yaml", words)
    attention = build_network(cfg, 3).stages[0].blocks[0].attn
    assert str(attention.pattern) == "axial | local:1,max"
    assert (attention.chunk, attention.max_reach, attention.backend) == (3, (3, 3), "masked")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("axail", "unknown pattern 'axail'; did you mean 'axial'"),
        ("axial / local:1 / swin:2", "has values for 3 stages, but the model has 2"),
        ("from_mask:small.npy", "a grid of 7 x 7 tokens needs a mask of 49 x 49 pairs, got 4 x 4"),
    ],
)
def test_a_bad_pattern_in_a_config_is_one_line(pattern, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("small.npy", np.ones((4, 4), bool))
    words = options(PATTERN=pattern)
    with pytest.raises(ConfigError, match=message) as error:
        build_network(get_config("digits/vil_nano.yaml", words), 3)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_a_pattern_of_one_size_is_not_exported_with_open_sizes(tmp_path):
    model = build("axial / random:0.5")
    message = "random:0.5,0 depends on the size of the grid, .* export the model for one image size"
    with pytest.raises(ValueError, match=message):
        export_model(model, tmp_path / "model.pt2", size=(28, 28))
    export_model(model, tmp_path / "model.pt2", size=(28, 28), dynamic=["batch"])


@pytest.mark.long
@pytest.mark.parametrize("file", ["model.pt2", "model.onnx"])
def test_patterns_that_depend_on_displacements_are_exported_with_open_sizes(file, tmp_path):
    model = build("axial | local:1; dilated:2; swin:3,1 / window:2")
    differences = export_model(model, tmp_path / file, size=(28, 36))
    assert len({difference.shape for difference in differences}) > 2


# Blocks from plain dicts


def test_a_block_is_built_from_a_dict():
    attention = dict(dim=8, num_heads=2, pattern="axial")
    fields = dict(attention="pattern", **attention, drop_path=0.2, norm_eps=1e-5)
    block = vil.build_block(fields)
    assert (block.norm1.eps, block.drop_path.drop_prob) == (1e-5, 0.2)
    assert block(torch.randn(2, 1 + 35, 8), (5, 7)).shape == (2, 36, 8)
    assert fields["attention"] == "pattern"  # unchanged
    same = vil.build_attention(name="pattern", **attention)
    assert str(same) == str(block.attn)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a block needs the field 'attention', one of full, longformer, pattern"),
        ({"attention": "full"}, "full attention needs dim and num_heads of at least 1"),
        ({"attention": "pattern", "patern": "axial"}, "field of a pattern block 'patern'; did you"),
        ({"attention": "full", "dim": 8, "num_heads": 2, "window": 3}, "field of a full block"),
    ],
)
def test_a_bad_dict_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        vil.build_block(fields)
