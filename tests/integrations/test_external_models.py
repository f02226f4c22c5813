"""Models of timm and torchvision: image sizes, weight decay, layers, heads, errors."""

import pytest
import timm
import torch

from vil.integrations.external_models import build_external
from vil.models.head_names import find_head_names
from vil.optim.param_groups import find_no_decay_params, number_layers
from vil.pretrained.load_weights import load_weights
from vil.utils.errors import CheckpointError

# name, image side: fixed and any size, with and without stochastic depth, torchvision's
MODELS = [
    ("timm/test_vit", 96),
    ("timm/test_resnet", 40),
    ("timm/vgg11", 64),
    ("resnet18", 40),
    ("vit_b_32", 96),
    ("maxvit_t", 448),
    ("googlenet", 64),
]


@pytest.mark.defect("B27")
@pytest.mark.parametrize(("name", "size"), MODELS)
def test_models_at_their_sizes(name, size):
    with torch.device("meta"):
        model = build_external(name, num_classes=3, img_size=size, drop_path_rate=0.1)
        for mode in (True, False):
            assert model.train(mode)(torch.empty(2, 3, size, size)).shape == (2, 3)


def test_gradient_checkpointing_if_supported():
    build_external("timm/test_vit", num_classes=3, img_size=96, grad_checkpoint=True)
    for name in ("resnet18", "timm/vgg11"):  # without the method; with one that only asserts
        with torch.device("meta"), pytest.raises(ValueError, match="has no gradient checkpointing"):
            build_external(name, num_classes=3, img_size=64, grad_checkpoint=True)


@pytest.mark.parametrize(("name", "size"), [("maxvit_t", 256), ("vit_b_32", 100)])
def test_a_side_that_the_windows_or_patches_do_not_divide_raises(name, size):
    message = f"{name} does not support images of {size} x {size} pixels: set img_size"
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_external(name, num_classes=3, img_size=size)


def test_a_model_without_published_weights_raises():
    known = {name.split(".")[0] for name in timm.list_pretrained()}
    name = next(name for name in timm.list_models() if name not in known)
    with pytest.raises(ValueError, match=f"timm/{name} has no published weights"):
        build_external(f"timm/{name}", num_classes=3, img_size=64, pretrained=True)


def test_norms_biases_and_positions_are_not_decayed():
    with torch.device("meta"):
        model = build_external("timm/test_vit", num_classes=3, img_size=96)
    excluded = find_no_decay_params(model)
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= excluded
    assert "head.weight" not in excluded
    assert "blocks.0.attn.qkv.weight" not in excluded


def test_layers_are_numbered_from_the_first_convolution_to_the_head():
    with torch.device("meta"):
        model = build_external("timm/test_vit", num_classes=3, img_size=96)
        numbers = number_layers(model)
        assert numbers.keys() == dict(model.named_parameters()).keys()
        assert numbers["patch_embed.proj.weight"] == 0
        assert numbers["blocks.0.mlp.fc1.weight"] < numbers["blocks.1.mlp.fc1.weight"]
        assert numbers["head.weight"] == max(numbers.values())
        with pytest.raises(ValueError, match="ResNet does not support OPTIM.LAYER_DECAY"):
            number_layers(build_external("resnet18", num_classes=3, img_size=64))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("timm/test_vit", "head"),
        ("timm/test_resnet", "fc"),
        ("squeezenet1_0", "classifier.1"),
        ("timm/swin_tiny_patch4_window7_224", "head.fc"),
        ("timm/deit_tiny_distilled_patch16_224", "head head_dist"),
    ],
)
def test_heads_are_found(name, head):
    with torch.device("meta"):
        model = build_external(name, num_classes=3, img_size=224)
    assert find_head_names(model) == [
        f"{h}.{leaf}" for h in head.split() for leaf in ("weight", "bias")
    ]


def test_weights_with_another_head(tmp_path):
    """Names like layer1.0... are torchvision's here, not the 2021 reference's."""
    four, three = (build_external("resnet18", num_classes=n, img_size=64) for n in (4, 3))
    with pytest.raises(CheckpointError, match=r"mismatched: fc\.bias \(4,\) -> \(3,\)"):
        load_weights(three, four.state_dict())
    assert load_weights(three, four.state_dict(), head="new").fresh == ["fc.weight", "fc.bias"]
    assert torch.equal(three.layer1[0].conv1.weight, four.layer1[0].conv1.weight)
    (tmp_path / "rows").write_text("3 0 1")
    load_weights(three, four.state_dict(), head=f"rows:{tmp_path / 'rows'}")
    assert torch.equal(three.fc.weight, four.fc.weight[[3, 0, 1]])


@pytest.mark.parametrize("name", ["timm/test_vit", "resnet18"])
def test_unreachable_published_weights_raise(name, monkeypatch, tmp_path):
    """The proxy is unreachable and the cache is empty."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(CheckpointError, match=f"the weights of {name} cannot be downloaded"):
        build_external(name, num_classes=3, img_size=160, pretrained=True)
