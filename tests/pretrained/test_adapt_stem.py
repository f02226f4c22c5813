"""Weights of a model for other image channels: the stem is adapted as timm does, and reported."""

import pytest
import timm
import torch
from timm.models import adapt_input_conv

from vil.integrations.external_models import build_external
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.adapt_stem import adapt_stem, find_stems
from vil.pretrained.load_weights import load_weights
from vil.utils.errors import CheckpointError

STEM = "stages.0.embed.proj.weight"


def build(in_chans, arch="l1,h1,d8,n1,s1,g1,p4,f2,a1", **kwargs):
    torch.manual_seed(0)
    return MsViT(parse_arch(arch), img_size=16, num_classes=5, in_chans=in_chans, **kwargs).eval()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 16])
def test_the_rule_is_timm_s(channels):
    weight = torch.randn(6, 3, 5, 5)
    found = adapt_stem(weight, torch.Size((6, channels, 5, 5)))
    assert torch.allclose(found, adapt_input_conv(channels, weight))


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 5), (1, 3), (4, 1), (5, 2)])
def test_weights_of_other_channels_load(before, after):
    source, model = build(before), build(after)
    report = load_weights(model, source.state_dict())
    assert report.adapted == [f"{STEM}: stem adapted from {before} to {after} channels"]
    assert report.complete
    assert not report.resized
    assert "stem adapted from" in report.one_line()
    assert model.head.weight.equal(source.head.weight)
    image = torch.randn(2, 1, 16, 16)  # the same in all channels gives the same result
    if after % before == 0 or after == 1:
        expected = source(image.expand(-1, before, -1, -1))
        assert torch.allclose(model(image.expand(-1, after, -1, -1)), expected, atol=1e-5)


def test_another_patch_or_width_is_still_refused():
    for arch in ("l1,h1,d8,n1,s1,g1,p2,f2,a1", "l1,h1,d12,n1,s1,g1,p4,f2,a1"):
        with pytest.raises(CheckpointError, match="do not fit"):
            load_weights(build(1), build(3, arch).state_dict())


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_stems_of_timm_models(name):
    source = timm.create_model(name, num_classes=3)
    model = build_external(f"timm/{name}", num_classes=3, img_size=160, in_chans=4)
    (stem,) = find_stems(model)
    report = load_weights(model, source.state_dict())
    assert report.adapted == [f"{stem}: stem adapted from 3 to 4 channels"]
    assert model(torch.zeros(1, 4, 160, 160)).shape == (1, 3)


def test_torchvision_models_take_three_channels():
    with torch.device("meta"), pytest.raises(ValueError, match=r"3 channels, got 4.*timm"):
        build_external("resnet18", num_classes=3, img_size=64, in_chans=4)
