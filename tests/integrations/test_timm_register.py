"""vil's models in timm: what timm's own tests (tests/timm_suite) do not cover."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.testing import assert_close

import vil
import vil.integrations.timm_register  # noqa: F401 - registers them
from tests.common.marks import cases
from vil.models.registry import ARCHS
from vil.models.vision_longformer import MsViT
from vil.pretrained.convert_2021 import get_2021_names
from vil.utils.errors import CheckpointError


def create(name="vil_tiny_rpb", **settings) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **settings).eval()


SMALL = ("vil_tiny", "vil_tiny_rpb", "vil_nano")


@pytest.mark.parametrize("name", cases(ARCHS, long=set(ARCHS) - {*SMALL}))
def test_timm_builds_the_same_model(name):
    """Of the smallest ones, the weights and logits are compared too."""
    is_small, models = name in SMALL, []
    for build in (vil.get_model, timm.create_model):
        torch.manual_seed(0)
        with torch.device("cpu" if is_small else "meta"):
            models.append(build(name, num_classes=5, img_size=64).eval())
    model, from_timm = models
    assert type(from_timm) is type(model) is MsViT
    assert (from_timm.specs, from_timm.settings) == (model.specs, model.settings)
    for a, b in zip(model.state_dict().items(), from_timm.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert a[1].shape == b[1].shape
        assert not is_small or torch.equal(a[1], b[1])
    if is_small:
        x = torch.randn(2, 3, 64, 64)
        assert torch.equal(from_timm(x), model(x))


@pytest.mark.parametrize(("name", "size"), [("vil_tiny", (97, 50)), ("vil_tiny_rpb", (32, 33))])
def test_rectangular_sizes_that_are_not_multiples_of_the_stride(name, size):
    model = create(name, num_classes=3)
    x = torch.randn(1, 3, *size)
    features = model.forward_features(x)
    assert features.shape == (1, 384, size[0] // 32, size[1] // 32)
    assert_close(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (1, 384)


@pytest.mark.parametrize("indices", [(0,), (1, 2, 3), (3, 1), (-1,), 2, None])
def test_maps_of_chosen_stages(indices):
    backbone = create(features_only=True, **({"out_indices": indices} if indices else {}))
    model = create()
    x = torch.randn(1, 3, 64, 96)
    wanted = model.forward_intermediates(x, indices=indices, intermediates_only=True)
    maps = backbone(x)
    assert [m.shape[1] for m in maps] == backbone.feature_info.channels()
    assert [64 // m.shape[2] for m in maps] == backbone.feature_info.reduction()
    for found, map_ in zip(maps, wanted, strict=True):
        assert_close(found, map_)


def test_layouts_and_norm_of_maps():
    model, x = create(), torch.randn(1, 3, 64, 96)
    features, maps = model.forward_intermediates(x, norm=True)
    assert_close(maps[-1], features)
    last = model.forward_intermediates(x, indices=1, output_fmt="NHWC", intermediates_only=True)[0]
    assert last.shape == (1, 2, 3, 384)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NLC")
    with pytest.raises(ValueError, match=r"stages from 0 to 3 \(or from -4 to -1\), got \[4\]"):
        model.forward_intermediates(x, indices=[4])
    with pytest.raises(ValueError, match="an integer `indices` must be from 1 to 4, got 7"):
        model.forward_intermediates(x, indices=7)


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", ""])
def test_pools(pool):
    model, x = create(num_classes=6, global_pool=pool), torch.randn(2, 3, 64, 64)
    assert model(x).shape == ((2, 6) if pool else (2, 6, 2, 2))
    model.reset_classifier(0)
    assert model.global_pool == pool
    assert model(x).shape == ((2, 384) if pool else (2, 384, 2, 2))
    model.reset_classifier(4, "avg")
    assert model(x).shape == (2, 4)
    with pytest.raises(ValueError, match="global_pool must be one of 'avg', 'max'.*'token'"):
        model.reset_classifier(4, "token")


def test_features_are_tokens_if_the_last_stage_has_a_global_token():
    model, x = create("vil_nano"), torch.randn(2, 3, 64, 64)
    features = model.forward_features(x)
    assert features.shape == (2, 1 + 16, 128)
    assert_close(model.forward_head(features, pre_logits=True), features.mean(1))
    model.reset_classifier(10, "token")
    assert_close(model.forward_head(features, pre_logits=True), features[:, 0])


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_rpb"])
def test_set_input_size(name):
    """Equals resizing in each forward pass, and has the shapes of a model built for the size."""
    model, x = create(name, img_size=64), torch.randn(1, 3, 96, 64)
    wanted = model(x)
    model.stages[0].requires_grad_(False)
    model.set_input_size((96, 64))
    assert_close(model(x), wanted)
    made = create(name, img_size=(96, 64))
    shapes = {key: value.shape for key, value in made.state_dict().items()}
    assert shapes == {key: value.shape for key, value in model.state_dict().items()}
    assert not any(p.requires_grad for p in model.stages[0].parameters())
    assert model.settings["img_size"] == (96, 64)


def test_set_input_size_of_linformer():
    model, x = create("vil_tiny", attention="linformer", img_size=64), torch.randn(1, 3, 96, 96)
    wanted = model(x)
    model.set_input_size(96)
    assert_close(model(x), wanted)


def test_layers_for_layer_wise_learning_rate_decay():
    """timm's layers are those of `layer_of`, but the last block includes the norm and the head."""
    model = create()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    ids = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {name: ids[id(p)] for name, p in model.named_parameters()}
    by_layer = {}
    for name, scale in scales.items():
        layer = min(model.layer_of(name), model.num_layers - 1)
        by_layer.setdefault(layer, set()).add(scale)
    assert by_layer == {n: {0.5 ** (model.num_layers - 1 - n)} for n in range(model.num_layers)}


@pytest.mark.parametrize(
    "wrap", [dict, lambda s: {"net": {f"module.{k}": v for k, v in s.items()}}], ids=["bare", "net"]
)
def test_2021_files_load_through_timm(tmp_path, wrap):
    """With other names, image size, input channels and classes."""
    source = vil.get_model("vil_tiny", img_size=64)
    names = get_2021_names(source)
    torch.save(
        wrap({names[k]: v for k, v in source.state_dict().items()}), tmp_path / "model_best.pth"
    )
    overlay = {"pretrained_cfg_overlay": {"file": str(tmp_path / "model_best.pth")}}
    same = create("vil_tiny", pretrained=True, img_size=64, **overlay)
    x = torch.randn(1, 3, 64, 64)
    assert_close(same(x), source.eval()(x))
    other = create("vil_tiny", pretrained=True, img_size=96, in_chans=1, num_classes=7, **overlay)
    assert other(torch.randn(1, 1, 96, 96)).shape == (1, 7)
    assert_close(other.stages[1].embed.proj.weight, source.stages[1].embed.proj.weight)
    assert_close(
        other.stages[0].embed.proj.weight, source.stages[0].embed.proj.weight.sum(1, keepdim=True)
    )
    backbone = create("vil_tiny", pretrained=True, img_size=64, features_only=True, **overlay)
    assert_close(backbone(x)[2], source.forward_intermediates(x, intermediates_only=True)[2])


def test_shipped_and_published_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    digits = create("vil_nano", pretrained=True)
    x = torch.randn(1, 3, 64, 64)
    assert_close(digits(x), vil.get_model("vil_nano", weights="DIGITS").eval()(x))
    three = create("vil_nano.digits", pretrained=True, num_classes=3, in_chans=1)
    assert three(x[:, :1]).shape == (1, 3)
    assert_close(three.stages[2].embed.proj.weight, digits.stages[2].embed.proj.weight)
    cfg = timm.get_pretrained_cfg("vil_medium_deep.in22k_ft_in1k_384")
    assert (cfg.input_size, cfg.crop_pct, cfg.num_classes) == ((3, 384, 384), 0.922, 1000)
    assert timm.get_pretrained_cfg("vil_medium_deep").tag == "in22k_ft_in1k_384"
    with torch.device("meta"):
        wide = create("vil_medium_wide.in22k_ft_in1k_384", num_classes=0)
    assert [spec.attn_size for spec in wide.specs] == [8, 12, 7, 7]
    assert wide.settings["img_size"] == (384, 384)
    monkeypatch.setattr("vil.pretrained.catalog.STORAGE", "https://localhost:1")
    with pytest.raises(CheckpointError, match=r"vil convert .*pretrained_cfg_overlay=dict") as said:
        create("vil_small.in1k", pretrained=True)
    assert "\n" not in str(said.value)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for vil_base_wide_rpb"):
        create("vil_base_wide_rpb", pretrained=True)


def test_a_cached_file_of_another_model_is_not_loaded(monkeypatch, tmp_path):
    """timm caches downloads by file name, and all published files have the same name."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    kept = tmp_path / "hub/checkpoints/model_best.pth"
    kept.parent.mkdir(parents=True)
    torch.save(vil.get_model("vil_tiny").state_dict(), kept)
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        create("vil_tiny.in1k", pretrained=True)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vil_tiny_rpb", {"windows": (5, 5, 7, 7), "qkv_bias": False}),
        ("vil_tiny", {"pos_resize": "crop", "img_size": 96}),
        ("vil_nano", {}),
    ],
)
def test_timm_loads_folders_of_save_pretrained(tmp_path, name, settings):
    model = vil.get_model(name, **{"img_size": 64, "num_classes": 3, **settings}).eval()
    vil.save_pretrained(model, tmp_path, transform={"mean": (0.1, 0.2, 0.3)})
    found = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    assert_close(found(x), model(x))
    assert list(found.pretrained_cfg["mean"]) == [0.1, 0.2, 0.3]


def test_an_external_u_net_trains_a_step():
    """segmentation_models_pytorch takes any timm model as encoder."""
    size = (96, 64)
    smp = pytest.importorskip("segmentation_models_pytorch")
    net = smp.Unet("tu-vil_tiny_rpb", encoder_weights=None, classes=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    images, targets = torch.randn(2, 3, *size), torch.randint(2, (2, *size))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    logits = net(images)
    assert logits.shape == (2, 2, *size)
    nn.functional.cross_entropy(logits, targets).backward()
    optimizer.step()
    still = [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    assert not still


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_save_pretrained_of_timm_s_models(tmp_path, pool):
    model = create("vil_nano", num_classes=3)
    model.reset_classifier(3, pool)
    vil.save_pretrained(model, tmp_path)
    x = torch.randn(1, 3, 64, 64)
    assert_close(vil.from_pretrained(tmp_path)(x), model(x))
    flat = create("vil_tiny", num_classes=3, global_pool="max")
    with pytest.raises(ValueError, match="save it with timm.models.save_for_hf"):
        vil.save_pretrained(flat, tmp_path)


# Weights of files


@pytest.fixture
def three(tmp_path):
    """A model with three classes, and its folder."""
    torch.manual_seed(1)
    model = vil.get_model("vil_nano", img_size=64, num_classes=3).eval()
    vil.save_pretrained(model, tmp_path / "three")
    return model, tmp_path / "three"


def from_file(file, **settings):
    overlay = dict(file=str(file))
    return create("vil_nano", pretrained=True, pretrained_cfg_overlay=overlay, **settings)


def test_a_file_may_record_how_images_are_read(three):
    """timm has no such settings."""
    model, folder = three
    read = dict(mean=[0.3] * 3, background=[0, 0, 0], value_range=[0, 4095])
    vil.save_pretrained(model, folder, transform=read)
    assert from_file(folder / "model.safetensors").pretrained_cfg["mean"] == [0.3] * 3


def test_the_head_of_a_file_is_kept_if_the_classes_match(three):
    """timm itself would compare with the classes of the published weights."""
    model, folder = three
    x = torch.randn(1, 3, 64, 64)
    for settings in ({}, {"num_classes": 3}):
        assert_close(from_file(folder, **settings)(x), model(x))
    assert from_file(folder / "model.safetensors", num_classes=5)(x).shape == (1, 5)


def test_a_file_sets_what_is_not_given(tmp_path):
    settings = {"windows": (2, 3, 4), "avg_pool": False, "img_size": 32, "num_classes": 3}
    model, x = vil.get_model("vil_nano", **settings).eval(), torch.randn(1, 3, 32, 32)
    vil.save_pretrained(model, tmp_path, transform={"mean": [0.1] * 3})
    found = from_file(tmp_path)
    assert torch.equal(found(x), model(x))
    assert (found.specs, list(found.pretrained_cfg["mean"])) == (model.specs, [0.1] * 3)
    assert from_file(tmp_path, avg_pool=True).global_pool == "avg"
    with pytest.raises(CheckpointError, match="weights of another architecture than vil_tiny"):
        create("vil_tiny", pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path)))


def test_a_2021_file_is_computed_by_its_rules(tmp_path):
    source = vil.get_model("vil_nano", attention="srformer")
    names = get_2021_names(source)
    file = tmp_path / "model_best.pth"
    torch.save({names[key]: value for key, value in source.state_dict().items()}, file)
    rules = from_file(file, attention="srformer").settings["attention_args"]
    assert rules == {"srformer": {"ragged": "drop"}}


def test_damaged_files_and_folders_raise(three):
    _, folder = three
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2001] ^= 16
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        from_file(file)
    with pytest.raises(CheckpointError, match="is damaged"):
        create(f"local-dir:{folder}", pretrained=True)
