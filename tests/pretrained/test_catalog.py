"""Weight enums, weight files and model folders: metadata, downloads, checksums, errors."""

import argparse
import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.testing import assert_close

import vil
from vil.config import get_config
from vil.data.transforms import eval_transform
from vil.models.vision_longformer import MsViT
from vil.pretrained.catalog import IMAGENET_CLASSES, SHIPPED, load_weight_classes
from vil.pretrained.convert_2021 import get_2021_names
from vil.pretrained.state_dict_io import read_metadata, read_weights, write_weights
from vil.tasks.image.build import transform_settings
from vil.utils.errors import CheckpointError

ROOT = Path(__file__).parents[2]
MEMBERS = [weights for kind in load_weight_classes().values() for weights in kind]


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """An empty download folder and an unreachable host."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("vil.pretrained.catalog.STORAGE", "https://localhost:1/none")


@pytest.mark.parametrize("weights", MEMBERS, ids=repr)
def test_metadata_of_members(weights):
    """Classes match the head, the transform matches the input, and both match the recipe."""
    cfg, meta = get_config(ROOT / weights.meta["recipe"]), weights.meta
    transform = weights.transforms()
    noise = np.random.RandomState(0).randint(0, 256, (70, 90, 3), np.uint8)
    picture = Image.fromarray(noise)
    assert transform(picture.convert("LA")).shape == transform(picture).shape
    size = meta["build"]["img_size"]
    assert transform(picture).shape == (3, size, size)
    recipe = eval_transform(cfg.INPUT.IMAGE_SIZE, **transform_settings(cfg))
    assert_close(transform(picture), recipe(picture))
    assert meta["status"] == ("measured" if "Nano" in repr(weights) else "published")
    if meta["categories"]:
        assert len(meta["categories"]) == meta["build"]["num_classes"] == cfg.DATA.NUM_CLASSES
    assert pickle.loads(pickle.dumps(weights)) is copy.deepcopy(weights) is weights
    assert vil.get_weight(repr(weights)) is weights


def test_names_follow_torchvision():
    assert vil.get_model_weights("vil_tiny") is vil.ViL_Tiny_Weights
    best = vil.ViL_Medium_Deep_Weights.DEFAULT
    assert best is vil.ViL_Medium_Deep_Weights.IMAGENET22K_FT_IMAGENET1K_384_V1
    assert best.meta["metrics"] == {"ImageNet-1K": {"acc@1": 85.6, "acc@5": 97.7}}
    assert best.url.endswith("imagenet384_finetune_bsz256_lr001_wd0/model_best.pth")
    assert len(IMAGENET_CLASSES) == 1000
    with pytest.raises(ValueError, match="did you mean 'IMAGENET1K_V1'"):
        vil.get_weight("ViL_Tiny_Weights.IMAGENET1K_V2")
    with pytest.raises(ValueError, match="another model: use a member of ViL_Small_Weights"):
        vil.get_model("vil_small", weights=vil.ViL_Tiny_Weights.DEFAULT)
    with pytest.raises(AttributeError, match="ViL_Huge_Weights"):
        vil.ViL_Huge_Weights  # noqa: B018


@pytest.mark.parametrize("weights", ["DEFAULT", "IMAGENET1K_V1", "ViL_Small_Weights.IMAGENET1K_V1"])
def test_downloads_without_a_network_raise(no_network, weights):
    said = "OUT.safetensors --model ViL_Small_W"
    with torch.device("meta"), pytest.raises(CheckpointError, match=said) as caught:
        vil.get_model("vil_small", weights=weights)
    assert "\n" not in str(caught.value)
    assert "ViL_Small_Weights.IMAGENET1K_V1 cannot be downloaded from https://" in str(caught.value)


def test_a_download_is_cached_and_loaded(no_network, tmp_path):
    """In the authors' layout: {net: {module.<2021 name>: ...}}."""
    model = vil.get_model("vil_tiny_rpb")
    names = get_2021_names(model)
    net = {f"module.{names[name]}": value for name, value in model.state_dict().items()}
    kept = tmp_path / "hub/checkpoints/ViL_Tiny_RPB_Weights-IMAGENET1K_V1.pth"
    kept.parent.mkdir(parents=True)
    torch.save({"net": net, "arch": "msvit", "epoch": 300, "best_acc": 76.65}, kept)
    found = vil.get_model("vil_tiny_rpb", weights="DEFAULT")
    assert torch.equal(found.norm.weight, model.norm.weight)
    assert torch.equal(found.head.weight, model.head.weight)


@pytest.mark.long
def test_weights_of_a_file(tmp_path):
    model = vil.get_model("vil_base_wide_rpb", img_size=32, num_classes=2)  # unpublished
    save_file(model.state_dict(), tmp_path / "wide.safetensors")
    settings = {"img_size": 32, "num_classes": 2}
    vil.get_model("vil_base_wide_rpb", weights=str(tmp_path / "wide.safetensors"), **settings)
    model = vil.get_model("vil_tiny", img_size=64, num_classes=4)
    file = tmp_path / "tiny.safetensors"
    save_file(model.state_dict(), file)
    found = vil.get_model("vil_tiny", weights=str(file), img_size=96, num_classes=4)
    assert found.stages[0].embed.position.x_pos_embed.shape == (1, 24, 24)
    with pytest.raises(CheckpointError, match="head of another size"):
        vil.get_model("vil_tiny", weights=file, img_size=64)
    other = vil.get_model("vil_tiny", weights=file, img_size=64, head="new")
    assert other.head.out_features == 1000
    with pytest.raises(CheckpointError, match="no weight file at nowhere.pth"):
        vil.get_model("vil_tiny", weights="nowhere.pth")
    with pytest.raises(ValueError, match="vil_tiny has 4 stages, but got 2 window sizes"):
        vil.get_model("vil_tiny", windows=(7, 7))


@pytest.mark.parametrize(
    ("attention", "settings"),
    [
        ("longformer", {"windows": (2, 3, 4), "avg_pool": False}),
        ("performer", {"windows": 5, "attention_args": {"performer": {"batch_max": True}}}),
    ],
)
def test_a_named_model_takes_the_settings_of_its_file(tmp_path, attention, settings):
    sizes, x = {"img_size": 32, "num_classes": 3}, torch.randn(2, 3, 32, 32)
    model = vil.get_model("vil_nano", attention=attention, **sizes, **settings).eval()
    vil.save_pretrained(model, tmp_path, classes=list("abc"))
    found = vil.get_model("vil_nano", weights=tmp_path).eval()
    assert torch.equal(found(x), model(x))
    assert (found.specs, found.notes["classes"]) == (model.specs, list("abc"))
    own = vil.get_model("vil_nano", weights=tmp_path, norm_eps=0.1, num_classes=5, head="new")
    assert (own.settings["norm_eps"], own.head.out_features) == (0.1, 5)
    with pytest.raises(CheckpointError, match="weights of another architecture than vil_tiny"):
        vil.get_model("vil_tiny", weights=tmp_path)


# Files


def test_a_flipped_bit_raises(tmp_path):
    """Anywhere in the tensors: safetensors itself loads such a file silently."""
    file = tmp_path / "x.safetensors"
    write_weights(file, {"a": torch.randn(50), "b": torch.randn(3, 3)}, {"format": 1})
    whole, start = file.read_bytes(), file.stat().st_size - 59 * 4
    for at in (start, start + 111, len(whole) - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"SHA-256 of its tensors is \w{64}, but"):
            read_weights(file)
    file.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=r"damaged or not.* \(its SHA-256 is \w{64}\)"):
        read_weights(file)
    file.write_bytes(whole)
    assert read_weights(file).keys() == {"a", "b"}
    with pytest.raises(CheckpointError, match="its model card has no object 'model'"):
        read_metadata(file)


def test_the_shipped_file_is_checked(tmp_path, monkeypatch):
    damaged = tmp_path / "vil_nano_digits.safetensors"
    content = bytearray((SHIPPED / damaged.name).read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    digits = vil.ViL_Nano_Weights.DIGITS
    monkeypatch.setattr(digits.value, "url", str(damaged))
    with pytest.raises(CheckpointError, match=rf"its SHA-256 is \w+, expected {digits.sha256}"):
        digits.get_state_dict()


def test_checkpoints_of_other_programs(tmp_path):
    """Averaged weights first; timm's store arguments too; compiled models have a prefix."""
    plain, average = {"w": torch.zeros(2)}, {"_orig_mod.w": torch.ones(2)}
    file = tmp_path / "last.pth.tar"
    torch.save(
        {"state_dict": plain, "state_dict_ema": average, "args": argparse.Namespace(lr=1)}, file
    )
    assert torch.equal(read_weights(file)["w"], torch.ones(2))
    average = {"n_averaged": torch.tensor(3), "module._orig_mod.w": torch.ones(2)}
    torch.save({"model": plain, "model_ema": average}, file)
    assert list(read_weights(file)) == ["w"]
    model = vil.get_model("vil_nano")
    assert vil.load_weights(torch.compile(model), {"net": model.state_dict()}).complete


# Folders


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_rpb", "vil_nano"])
def test_save_and_load_a_folder(tmp_path, name):
    model = vil.get_model(name, img_size=64, num_classes=3).eval()
    vil.save_pretrained(model, tmp_path / "hub", transform={"mean": [0.5] * 3}, classes=list("abc"))
    assert sorted(p.name for p in (tmp_path / "hub").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    x = torch.randn(1, 3, 64, 64)
    for source in (tmp_path / "hub", str(tmp_path / "hub"), tmp_path / "hub/model.safetensors"):
        found = vil.from_pretrained(source)
        assert type(found) is MsViT
        assert torch.equal(found(x), model(x))
    larger = vil.from_pretrained(tmp_path / "hub", img_size=96)
    assert larger.settings["img_size"] == 96
    assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 3)


def test_folders_keep_transform_and_classes(tmp_path):
    model = vil.get_model("vil_nano", weights="DIGITS")
    (tmp_path / "README.md").write_text("mine")
    vil.save_pretrained(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    found = vil.from_pretrained(tmp_path)
    assert found.notes["classes"] == [str(digit) for digit in range(10)]
    assert found.notes["transform"]["mean"] == [0.3] * 3
    five = vil.from_pretrained(tmp_path, num_classes=5, head="new")
    assert five.head.out_features == 5
    with pytest.raises(ValueError, match="unknown setting of a model 'img_sise'.*img_size"):
        vil.from_pretrained(tmp_path, img_sise=3)
    with pytest.raises(ValueError, match="the model has 10 classes, but 2 class names are given"):
        vil.save_pretrained(found, tmp_path, classes=["a", "b"])
    found.head = torch.nn.Sequential(torch.nn.Dropout(), found.head)
    with pytest.raises(ValueError, match=r"nn.Linear or nn.Identity \(no head\), got Sequential"):
        vil.save_pretrained(found, tmp_path)


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1"])
def test_a_folder_without_weights_raises(tmp_path, content):
    vil.save_pretrained(vil.get_model("vil_nano"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if content:
        (tmp_path / "model.safetensors").write_text(content)
    with pytest.raises(CheckpointError, match="model.safetensors is missing, damaged") as caught:
        vil.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_folders_raise(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        vil.from_pretrained(tmp_path)
    for text, pattern in (
        ("no", "cannot read its model card"),
        ('{"vil": {"format": 1, "model": {}}}', "model card has no 'trans"),
        ('{"architecture": "resnet18"}', "'vil'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=pattern) as caught:
            vil.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
    torch.save({"a": torch.ones(1)}, tmp_path / "bare.pth")
    with pytest.raises(CheckpointError, match="has no model card: run vil convert"):
        vil.from_pretrained(tmp_path / "bare.pth")
    with pytest.raises(ValueError, match=r"transform can have only the keys mean, .*, got size"):
        vil.save_pretrained(vil.get_model("vil_nano"), tmp_path / "x", transform={"size": 3})


def test_an_unreachable_repository_raises(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no folder someone/vil, and a repository"):
        vil.from_pretrained("someone/vil")
