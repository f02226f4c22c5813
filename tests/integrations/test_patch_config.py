"""MODEL.PATCH_ATTENTION: local attention in a ViT of timm, from a config."""

import logging

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vil as package
from tests.common.small_runs import FAKE, succeeds, vil
from vil.engine.distributed import DistInfo
from vil.export import load_exported
from vil.integrations.build import build_network
from vil.integrations.timm_attention import PatchedAttention, PatchedLongformer
from vil.tasks import task_for
from vil.utils.errors import ConfigError
from vil.workflows.attention_backend import backend_requests, select_attention_backends
from vil.workflows.configure import make_config
from vil.workflows.execution import execution_of
from vil.workflows.train import train_config

DINOV3 = "MODEL.ARCH=timm/vit_small_patch16_dinov3"
VIT = ("MODEL.ARCH=timm/test_vit", "INPUT.IMAGE_SIZE=96", "DEVICE=cpu", "DATA.NUM_CLASSES=4")


def config(text, *words):
    return make_config(None, [*VIT, f"MODEL.PATCH_ATTENTION={text}", *words])


def patched(model) -> list[PatchedAttention]:
    return [module for module in model.modules() if isinstance(module, PatchedAttention)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window=2", dict(window=2)),
        ("pattern='axial | local:1', chunk=4", dict(pattern="axial | local:1", chunk=4)),
        ("attention='global', blocks=[0, -1]", dict(attention="global", blocks=[0, -1])),
    ],
)
def test_the_text_gives_the_model_that_the_call_gives(text, expected):
    images = torch.randn(2, 3, 96, 96)
    network = build_network(config(text), 4).eval()
    other = package.patch_attention(build_network(config(""), 4), **expected).eval()
    assert torch.equal(network(images), other(images))
    assert not torch.equal(network(images), build_network(config(""), 4).eval()(images))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "expected arguments of vil.patch_attention as in Python, such as window=8"),
        ("window=", "expected arguments of vil.patch_attention"),
        ("window 8", "expected arguments of vil.patch_attention"),
        ("model=3", "expected arguments of vil.patch_attention"),
        ("window=open('a')", "expected arguments of vil.patch_attention"),
        ("windw=8", "did you mean 'window'"),
        ("window=0", "window must be an integer of at least 1"),
        ("blocks=[99], window=2", "there is no block 99"),
        ("pattern='local'", "local"),
    ],
)
def test_a_wrong_text_is_named(text, message):
    with pytest.raises(ConfigError, match="MODEL.PATCH_ATTENTION ") as error:
        build_network(config(text), 4)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("resnet18", "expected a timm vision transformer"),
        ("timm/test_resnet", "expected a timm vision transformer"),
        ("timm/naflexvit_base_patch16_gap", "cannot patch NaFlexVit"),
    ],
)
def test_a_model_without_a_grid_of_patches_is_refused(arch, message):
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        build_network(config("window=2", f"MODEL.ARCH={arch}", "INPUT.IMAGE_SIZE=384"), 4)


def test_a_window_that_covers_the_grid_is_a_warning(caplog):
    build_network(config("window=2"), 4)
    assert not caplog.records
    build_network(config("window=1000000000"), 4)
    assert "attends to all" in caplog.text
    caplog.clear()
    build_network(config("window=3"), 4)
    assert "for images of 96 pixels, each of the 6 x 6 patches attends to all" in caplog.text


def test_msvit_says_that_the_key_has_no_effect(caplog):
    build_network(make_config("digits/vil_nano.yaml", ["MODEL.PATCH_ATTENTION=window=2"]), 10)
    assert "MODEL.PATCH_ATTENTION" in caplog.text


def test_the_backends_are_selected_before_the_first_step(caplog):
    caplog.set_level(logging.INFO)
    cfg = config("window=2, backend='blocked'", "DATA.TRAIN=[fake]", "DATA.TEST=[fake]")
    model = task_for(cfg, torch.device("cpu")).build_model()
    execution = execution_of(cfg, torch.device("cpu"), 1)
    requests = backend_requests(model, execution)
    assert {(r.case.window.grid, r.case.needs_grad, r.backend) for r in requests} == {
        ((6, 6), grad, "blocked") for grad in (True, False)
    }
    assert len(requests[0].modules) == len(model.blocks)
    select_attention_backends(model, execution, DistInfo(), training=True)
    assert "blocked" in caplog.text


@pytest.mark.parametrize("head", ["fpn", "mlp"])
def test_a_segmentation_model_is_patched(head):
    own = ["TASK=segmentation", f"SEGMENTATION.MODEL={head}", "DATA.TRAIN=[fake_masks]"]
    cfg = config("window=2", *own, "DATA.TEST=[fake_masks]", "MODEL.ARCH=timm/vit_tiny_patch16_224")
    model = task_for(cfg, torch.device("cpu")).build_model()
    assert {type(module) for module in patched(model)} == {PatchedLongformer}
    assert model(torch.randn(1, 3, 50, 83)).shape == (1, 4, 50, 83)


def test_a_resumed_run_with_random_shift_is_bit_identical(tmp_path):
    words = [*FAKE, "DATALOADER.BSZ=16", "OPTIM.EPOCHS=2", "OPTIM.LR=0.01", "OPTIM.OPT=sgd"]

    def run(folder, **options):
        cfg = config("window=2, mode=1, mode_switch=0.6", *words, f"OUTPUT_DIR={tmp_path / folder}")
        return train_config(cfg, **options)

    whole = run("whole")
    run("parts", max_steps=whole.step // 2 + 1)
    resumed = run("parts", resume=True)
    one, other = (load_file(r.last_checkpoint / "model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.best == whole.best


@pytest.mark.long
def test_a_dinov3_network_is_trained_evaluated_and_exported(tmp_path):
    words = [*VIT, *FAKE, DINOV3, "MODEL.PATCH_ATTENTION=window=2", "DATA.KWARGS={n: 8}"]
    run = tmp_path / "run"
    short = ["OPTIM.EPOCHS=1", "DATALOADER.BSZ=4"]
    succeeds("train", "--output_dir", run, *words, *short)
    succeeds("evaluate", "--run", run)
    model = package.load_for_inference(run)
    assert len(patched(model.model)) == 12
    images = torch.randn(2, 3, 96, 96)
    file = tmp_path / "net.onnx"
    succeeds("export", "--run", run, "--out", file, "--dynamic", "batch")
    with torch.no_grad():
        expected = model.model(images)
    torch.testing.assert_close(
        torch.as_tensor(load_exported(file)(images)), expected, rtol=1e-3, atol=1e-4
    )
    Image.new("RGB", (96, 96)).save(tmp_path / "photo.png")
    assert (
        "would save little" in vil("predict", "--run", run, "--stream", tmp_path / "photo.png").err
    )
