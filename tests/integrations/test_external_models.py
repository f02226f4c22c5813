"""Models of timm and torchvision: image sizes, weight decay, layers, heads, errors."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model_builder, get_model_weights
from torchvision.transforms.functional import normalize

from vil.config import get_config, override
from vil.integrations.build import build_network
from vil.integrations.external_models import build_external
from vil.models.head_names import find_head_names
from vil.optim.param_groups import find_no_decay_params, number_layers
from vil.pretrained.load_weights import load_weights
from vil.utils.errors import CheckpointError, ConfigError
from vil.workflows.resume_checks import adopt_saved, config_to_keep

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


def test_retries_of_a_download_are_not_logged(monkeypatch, caplog, tmp_path):
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    url = "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
    with pytest.raises(CheckpointError, match=r"downloaded \(.*refused.*MODEL\.PRETRAINED"):
        build_external("timm/test_vit", num_classes=3, img_size=160, pretrained=True)
    assert waits
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "size"),
    [("googlenet", 64), pytest.param("inception_v3", 96, marks=pytest.mark.long)],
)
def test_published_weights_get_the_input_of_torchvision(name, size, monkeypatch):
    """A model of a config gets it by INPUT.MEAN and INPUT.STD, which a run records, so that runs
    with other values are evaluated as they were trained."""
    torch.manual_seed(0)
    state = get_model_builder(name)(init_weights=False).state_dict()
    for value in state.values():
        if value.ndim == 4:
            nn.init.kaiming_normal_(value)
    weights = get_model_weights(name).DEFAULT
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *_, **__: dict(state))
    cfg = get_config(
        opts=[f"MODEL.ARCH={name}", f"INPUT.IMAGE_SIZE={size}", "MODEL.PRETRAINED=True"]
    )
    pixels = torch.rand(2, 3, size, size, dtype=torch.float64)
    images = normalize(pixels, get_config().INPUT.MEAN, get_config().INPUT.STD)
    alone = build_external(name, num_classes=1000, img_size=size, pretrained=True)
    ours, theirs = build_network(cfg, 1000, load_pretrained=True), get_model_builder(name)
    with torch.no_grad():
        expected = theirs(weights=weights).eval().double()(images)
        torch.testing.assert_close(alone.eval().double()(images), expected)
        images = normalize(pixels, cfg.INPUT.MEAN, cfg.INPUT.STD)
        torch.testing.assert_close(ours.eval().double()(images), expected, rtol=1e-6, atol=1e-6)
    assert (alone.transform_input, ours.transform_input) == (True, False)


HALF = [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arch", "mean", "crop", "interpolation"),
    [
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", HALF, 0.9, 3),
        ("timm/resnet18.a1_in1k", [0.485, 0.456, 0.406], 0.95, 3),
        ("resnet50", [0.485, 0.456, 0.406], 0.965, 2),  # 224 of 232 pixels
    ],
)
def test_a_config_takes_the_preprocessing_of_its_weights(arch, mean, crop, interpolation):
    words = [f"MODEL.ARCH={arch}", "MODEL.PRETRAINED=True"]
    images = get_config(opts=words).INPUT
    assert (mean, crop, interpolation) == (images.MEAN, images.CROP_PCT, images.INTERPOLATION)
    assert int(224 / images.CROP_PCT) == int(224 / crop)
    images = get_config(opts=[*words, "INPUT.MEAN=[0.1,0.2,0.3]", "INPUT.CROP_PCT=0.875"]).INPUT
    assert (images.MEAN, images.CROP_PCT) == ([0.1, 0.2, 0.3], 0.875)
    assert get_config(opts=words[:1]).INPUT == get_config().INPUT
    own = get_config("own/vil_tiny_224.yaml", words).INPUT
    assert (mean, 1.0) == (own.MEAN, own.CROP_PCT)


def test_a_config_of_unknown_weights_is_refused_by_the_model():
    for arch in ("timm/vit_tiny_patch16_224.no_tag", "timm/no_model", "no_model"):
        cfg = get_config(opts=[f"MODEL.ARCH={arch}", "MODEL.PRETRAINED=True"])
        with pytest.raises(ConfigError, match=f"unknown .*{arch.removeprefix('timm/')}"):
            build_network(cfg, 3)


def test_a_resumed_run_keeps_the_preprocessing_that_it_began_with():
    words = ["MODEL.ARCH=timm/vit_tiny_patch16_224", "MODEL.PRETRAINED=True"]
    saved = config_to_keep(override(get_config(opts=words[:1]), words[1:]))
    cfg, changes = adopt_saved(get_config(opts=words), saved)
    assert (cfg.INPUT, changes) == (saved.INPUT, [])
    cfg, changes = adopt_saved(get_config(opts=[*words, "INPUT.CROP_PCT=1.0"]), saved)
    assert cfg.INPUT.CROP_PCT == 1.0
    assert len(changes) == 1


def test_other_preprocessing_than_that_of_the_weights_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **__: None)
    words = ["MODEL.ARCH=timm/vit_tiny_patch16_224", "MODEL.PRETRAINED=True"]
    cfg = get_config(opts=words)
    build_network(cfg, 4, load_pretrained=True)
    assert not caplog.messages
    cfg = override(cfg, ["INPUT.MEAN=[0.1,0.2,0.3]"])
    build_network(cfg, 4)  # for a checkpoint, whose run has warned
    assert not caplog.messages
    build_network(cfg, 4, load_pretrained=True)
    (said,) = caplog.messages
    assert said.endswith("add INPUT.MEAN '[0.5, 0.5, 0.5]'")


@pytest.mark.parametrize(
    ("name", "size", "first", "after"),
    [
        ("timm/test_resnet", 40, ("conv1", "bn1", "layer1"), ("layer2", "fc")),
        ("timm/test_convnext", 64, ("stem", "stages.0"), ("stages.1", "head")),
        ("timm/test_vit", 96, ("patch_embed", "pos_embed", "cls_token", "blocks.0"), ("blocks.1",)),
    ],
)
def test_freezing_the_first_stage_of_a_timm_model(name, size, first, after):
    words = [f"MODEL.ARCH={name}", f"INPUT.IMAGE_SIZE={size}", "FINETUNE.FREEZE_STAGES=1"]
    model = build_network(get_config(opts=words), 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model.train()(torch.randn(2, 3, size, size)).square().sum().backward()
    optimizer.step()
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert {name for name in (*first, *after) if any(k.startswith(name) for k in changed)} == set(
        after
    )
    assert not any(key.startswith(first) for key in changed)  # running statistics included


def test_stages_that_cannot_be_frozen():
    for arch, count, message in [
        ("timm/test_resnet", 9, "FREEZE_STAGES 9: timm/test_resnet has 4 stages"),
        ("resnet18", 1, "resnet18 has no stages to freeze"),
    ]:
        cfg = get_config(opts=[f"MODEL.ARCH={arch}", f"FINETUNE.FREEZE_STAGES={count}"])
        with pytest.raises(ConfigError, match=message):
            build_network(cfg, 3)
