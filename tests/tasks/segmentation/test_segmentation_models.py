"""Segmentation models: sizes, gradients, padding, layers, weights, and export."""

from functools import cache

import pytest
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from vil.config import get_config
from vil.export.exporter import export_model
from vil.export.runtime import load_exported
from vil.integrations.build import build_network
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.optim.param_groups import find_no_decay_params, number_layers
from vil.pretrained.state_dict_io import write_weights
from vil.tasks.segmentation.models import (
    build_model,
    load_segmentation_weights,
    strip_classifier,
)
from vil.utils.errors import CheckpointError

CLASSES = 5
NANO = "l1,h1,d32,n1,s1,g1,p4,f4,a{a}_l2,h2,d64,n2,s1,g1,p2,f3,a{a}_l3,h4,d128,n1,s0,g1,p2,f3,a{a}"
SWIN = "timm/small_swin"
BODIES = ("msvit", "timm/resnet18", SWIN)
OURS = ("fpn", "mlp", "upernet")
SMP = (
    "DeepLabV3", "DeepLabV3Plus", "FPN", "Linknet", "MAnet", "PAN", "PSPNet", "Segformer",
    "UPerNet", "Unet", "UnetPlusPlus",
)  # fmt: skip
KINDS = (("msvit", 0), ("msvit", 1), ("timm/resnet18", 0))  # 1: absolute position embeddings
SIZES = ((61, 83), (5, 7), (1, 1), (64, 96))


default_cfgs = generate_default_cfgs(  # register_model reads it
    {"small_swin": {"input_size": (3, 224, 224), "fixed_input_size": True, "classifier": "head.fc"}}
)


@register_model
def small_swin(pretrained: bool = False, **options) -> nn.Module:
    """A Swin of 0.3 million parameters with maps (B, H, W, C), as those of all its sizes."""
    sizes = dict(embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=4)
    feature_cfg = dict(flatten_sequential=True, out_indices=(0, 1, 2, 3))
    return build_model_with_cfg(
        SwinTransformer, "small_swin", pretrained, feature_cfg=feature_cfg, **sizes, **options
    )


def classifier(arch: str, absolute: int = 0) -> nn.Module:
    torch.manual_seed(0)
    if arch == "msvit":
        return MsViT(parse_arch(NANO.format(a=absolute), "longformer"), img_size=64, num_classes=9)
    cfg = get_config("_base_/classification.yaml", ["MODEL.ARCH", arch, "INPUT.IMAGE_SIZE", 64])
    return build_network(cfg, 9, any_size=True)


def segmenter(
    name: str, arch: str = "msvit", classes: int = CLASSES, absolute: int = 0
) -> nn.Module:
    """A model whose vectors, such as those of norms, are not all 0 or all 1."""
    body = strip_classifier(classifier(arch, absolute))
    model = build_model(name, body, classes, channels=16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.05 * torch.randn_like(parameter)
        model.get_classifier().weight.normal_(std=0.2)
    return model


@cache
def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arch", BODIES)
@pytest.mark.parametrize("name", [*OURS, "smp/Unet", "smp/FPN"])
def test_any_size_and_every_gradient(name, arch):
    model = segmenter(name, arch)
    for size in SIZES:
        with torch.no_grad():
            assert model.eval()(pixels(2, 3, *size)).shape == (2, CLASSES, *size)
    (model.train()(pixels(2, 3, 61, 83)) * pixels(2, CLASSES, 61, 83)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        # the global tokens of a stage's last block have no influence on its map
        assert parameter.grad.abs().sum() > 0 or key.endswith("g2g_relative_position_bias"), key


@pytest.mark.parametrize("size", [(5, 7), (61, 83), (64, 90)], ids=str)
@pytest.mark.parametrize("absolute", [0, 1])
@pytest.mark.parametrize("name", OURS)
def test_the_padding_of_an_image_has_no_influence(name, absolute, size):
    model, images = segmenter(name, absolute=absolute).eval(), pixels(2, 3, *size)
    with torch.no_grad():
        expected = model(images)
    height, width = (n + -n % model.body.strides[0] for n in size)  # in whole patches

    def fill(stage, args):
        noise = 9 * pixels(*args[0].shape)
        noise[..., :height, :width] = args[0][..., :height, :width]
        assert not torch.equal(noise, args[0])
        return (noise, *args[1:])

    model.body.stages[0].register_forward_pre_hook(fill)
    with torch.no_grad():
        assert torch.equal(model(images), expected)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["msvit", "timm/resnet18", "timm/swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("name", SMP)
def test_every_decoder_of_smp(name, arch):
    model = segmenter(f"smp/{name}", arch).train()
    model(pixels(2, 3, 61, 83)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert model.eval()(pixels(1, 3, 5, 7)).shape == (1, CLASSES, 5, 7)


@pytest.mark.parametrize("arch", BODIES)
@pytest.mark.parametrize("name", OURS)
def test_an_image_does_not_depend_on_its_batch(name, arch):
    model = segmenter(name, arch).eval()
    pair = torch.stack([pixels(3, 61, 83), 9 * pixels(3, 61, 83).flip(-1)])
    with torch.no_grad():
        torch.testing.assert_close(model(pair)[:1], model(pair[:1]))


@pytest.mark.parametrize("arch", ["timm/resnet18", SWIN])
@pytest.mark.parametrize("name", ["Unet", "FPN"])
def test_models_of_smp_are_those_of_smp(name, arch):
    smp = pytest.importorskip("segmentation_models_pytorch")
    options = {"dynamic_img_size": True} if arch == SWIN else {}
    encoder = arch.replace("timm/", "tu-")
    theirs = getattr(smp, name)(encoder, encoder_weights=None, classes=CLASSES, **options).eval()
    ours = segmenter(f"smp/{name}", arch).eval()
    state = {
        f"head.{key}": value
        for key, value in theirs.state_dict().items()
        if not key.startswith("encoder.")
    }
    bodies = [list(m.state_dict().items()) for m in (ours.body, theirs.encoder.model)]
    assert [value.shape for _, value in bodies[0]] == [value.shape for _, value in bodies[1]]
    state |= {f"body.{key}": value for (key, _), (_, value) in zip(*bodies)}
    ours.load_state_dict(state)
    with torch.no_grad():
        images = pixels(2, 3, 64, 96)
        torch.testing.assert_close(ours(images), theirs(images))


def test_layers_and_weight_decay_are_those_of_msvit():
    network, model = classifier("msvit"), segmenter("fpn")
    inside = [
        name for name, _ in network.named_parameters() if not name.startswith(("norm.", "head."))
    ]
    assert all(model.layer_of(f"body.{name}") == network.layer_of(name) for name in inside)
    excluded = network.no_weight_decay().intersection(inside)
    assert model.no_weight_decay() == {f"body.{name}" for name in excluded}
    assert model.layer_of("head.classifier.bias") == model.num_layers == network.num_layers


@pytest.mark.parametrize("arch", ["timm/resnet18", SWIN])
def test_layers_and_weight_decay_are_those_of_timm(arch):
    network, model = classifier(arch), segmenter("mlp", arch)
    theirs, ours = number_layers(network), number_layers(model)
    inside = [name for name in model.body.network.state_dict() if name in theirs]
    assert all(ours[f"body.network.{name}"] == theirs[name] for name in inside)
    assert ours["head.classifier.weight"] == model.num_layers == max(theirs[n] for n in inside) + 1
    excluded = find_no_decay_params(network).intersection(inside)
    assert {f"body.network.{name}" for name in excluded} <= find_no_decay_params(model)
    assert "head.norms.0.weight" in find_no_decay_params(model)


def test_networks_that_do_not_fit_are_refused():
    vit = strip_classifier(classifier("timm/vit_tiny_patch16_224"))
    assert build_model("fpn", vit, CLASSES, channels=8)(pixels(1, 3, 61, 83)).shape[2:] == (61, 83)
    with pytest.raises(ValueError, match="smp/Unet needs a network with stages of the strides"):
        build_model("smp/Unet", vit, CLASSES, channels=8)
    with pytest.raises(ValueError, match="did you mean 'Unet'"):
        build_model("smp/UNet", vit, CLASSES, channels=8)
    with pytest.raises(ValueError, match="upernet"):
        build_model("uppernet", vit, CLASSES, channels=8)
    with pytest.raises(ValueError, match="no intermediate features"):
        strip_classifier(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="does not support images of any size"):
        strip_classifier(classifier("timm/levit_128s"))


def saved(model: nn.Module, path) -> object:
    write_weights(path, model.state_dict(), {})
    return path


@pytest.mark.parametrize("arch", BODIES)
def test_weights_of_a_segmentation_model_and_of_a_classifier(arch, tmp_path):
    source, model = segmenter("fpn", arch), segmenter("fpn", arch)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    path = saved(source, tmp_path / "model.safetensors")
    load_segmentation_weights(model, path)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    other = segmenter("fpn", arch, classes=3)
    with pytest.raises(CheckpointError, match="a head of another size"):
        load_segmentation_weights(other, path)
    report = load_segmentation_weights(other, path, head="new")
    assert sorted(report.fresh) == ["head.classifier.bias", "head.classifier.weight"]
    (tmp_path / "rows").write_text("4\n0\n2\n")
    load_segmentation_weights(other, path, head=f"rows:{tmp_path / 'rows'}")
    assert torch.equal(other.head.classifier.bias, source.head.classifier.bias[[4, 0, 2]])

    network = classifier(arch)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    path = saved(network, tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match="the head would be random"):
        load_segmentation_weights(model, path)
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    report = load_segmentation_weights(model, path, strict=False)
    body = getattr(model.body, "network", model.body).state_dict()
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in body.items())
    assert all(torch.equal(value, head[name]) for name, value in model.head.state_dict().items())
    assert set(report.ignored) == network.state_dict().keys() - body.keys()


def test_the_body_of_a_detector(tmp_path):
    network, model = classifier("msvit"), segmenter("mlp")
    state = {f"backbone.body.{name}": value + 1 for name, value in network.state_dict().items()}
    state = {name: value for name, value in state.items() if ".head." not in name}
    write_weights(tmp_path / "d.safetensors", state | {"rpn.bias": torch.zeros(2)}, {})
    report = load_segmentation_weights(model, tmp_path / "d.safetensors", strict=False)
    assert torch.equal(
        model.body.stages[1].embed.proj.weight, network.stages[1].embed.proj.weight + 1
    )
    assert "rpn.bias" in report.ignored


@pytest.mark.long
@pytest.mark.parametrize(("arch", "absolute"), KINDS[1:])  # an msvit only with positions
def test_exported_mlp_takes_images_of_any_size(arch, absolute, tmp_path):
    model = segmenter("mlp", arch, absolute=absolute).eval()
    sizes = {"mlp.onnx": [(5, 7), (1, 200)], "mlp.pt2": []}  # a program takes no sides below 32
    for file, small in sizes.items():
        export_model(model, tmp_path / file, size=(64, 96), dynamic=("size",))
        run = load_exported(tmp_path / file)
        for size in (*small, (61, 83), (64, 64)):
            images = pixels(1, 3, *size)
            with torch.no_grad():
                torch.testing.assert_close(run(images), model(images), rtol=0, atol=1e-4)
