"""`vil convert`: files that do not say what they are become files that do."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import vil as package
from tests.common.small_runs import FAKE, TINY, succeeds, vil
from tests.common.small_tasks import SMALL_TASKS
from vil.config import get_config
from vil.engine.checkpoint.save_load import AVERAGE
from vil.models.arch import format_arch
from vil.pretrained.catalog import image_transform
from vil.pretrained.convert_2021 import get_2021_names
from vil.pretrained.state_dict_io import read_metadata, read_weights

USAGE, CHECKPOINT = 2, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return package.get_model(
        "vil_tiny_rpb", img_size=96, num_classes=4, windows=(6, 6, 7, 7)
    ).eval()


@pytest.fixture(autouse=True)
def files(model, tmp_path, monkeypatch):
    """best.pth and detector.pth as the 2021 code wrote them."""
    monkeypatch.chdir(tmp_path)
    names = get_2021_names(model)
    state = {names[name]: value for name, value in model.state_dict().items()}
    net = {f"module.{name}": value for name, value in state.items()}
    torch.save({"net": net, "arch": "msvit", "epoch": 3, "best_acc": 1.0}, "best.pth")
    backbone = {f"backbone.bottom_up.{name}": value for name, value in state.items()}
    torch.save({"model": backbone | {"roi_heads.x": torch.ones(2)}}, "detector.pth")


@pytest.mark.long
def test_which_model_it_is_is_found_out(model):
    ended = vil("convert", "best.pth", "out.safetensors")
    assert ended.code == 0, ended.err
    assert "inferred model: vil_tiny_rpb, 96 px" in ended.out
    assert re.search(r"weights of best\.pth: \d+ loaded\n", ended.out)
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(package.from_pretrained("out.safetensors")(x), model(x))
    source = read_metadata("out.safetensors")["source"]
    assert source["file"] == "best.pth"
    assert re.fullmatch(r"[0-9a-f]{64}", source["sha256"])


def test_of_a_detector_the_backbone(model):
    ended = vil("convert", "detector.pth", "out.safetensors")
    assert ", 1 ignored" in ended.out
    assert torch.equal(read_weights("out.safetensors")["norm.weight"], model.norm.weight)


def test_a_detector_of_ours_is_not_converted(model):
    state = {f"backbone.body.{name}": value for name, value in model.state_dict().items()}
    torch.save(state, "ours.pth")
    ended = vil("convert", "ours.pth", "out.safetensors")
    assert ended.code == USAGE
    assert "ours.pth is a detector, which cannot be converted" in ended.err
    assert not Path("out.safetensors").exists()


def test_what_is_written_needs_no_config(model):
    """It says what it is: model, transform and classes, to every command."""
    Path("names.txt").write_text("a\nb\nc\nd\n")
    words = ["--config-file", "imagenet/vil_tiny_rpb.yaml", "DATA.NUM_CLASSES=4",
             "INPUT.IMAGE_SIZE=96", "INPUT.MEAN=[0.2, 0.3, 0.4]", "--classes", "names.txt",
             "DATA.VALUE_RANGE=[0, 4095]",
             "MODEL.VIT.MSVIT.ARCH=" + format_arch(model.specs)]  # fmt: skip
    assert vil("convert", "best.pth", "out.safetensors", *words).code == 0
    pixels = np.linspace(0, 4095, 96 * 90).reshape(96, 90).astype(np.uint16)
    Image.fromarray(pixels).save("photo.png")
    ended = vil("predict", "MODEL.MODEL_PATH", "out.safetensors", "photo.png", "--format", "json")
    assert ended.code == 0, ended.err
    shown = {row["class"]: row["probability"] for row in json.loads(ended.out)[0]["classes"]}
    same = package.from_pretrained("out.safetensors")
    settings = same.notes["transform"]
    assert (settings["mean"], settings["value_range"]) == ([0.2, 0.3, 0.4], [0, 4095])
    image = image_transform(input_size=96, **settings)(Image.open("photo.png"))
    wanted = same(image[None]).softmax(-1)[0]
    for name, probability in zip(same.notes["classes"], wanted.tolist()):
        assert shown[name] == pytest.approx(probability, abs=1e-5)


@pytest.mark.long
def test_a_run(tmp_path):
    assert vil("train", *TINY, "OPTIM.EPOCHS=1", "OPTIM.EMA=0.9", "--output_dir", "run").code == 0
    ended = vil("convert", "run", "run.safetensors")
    assert ended.code == 0, ended.err
    about = read_metadata("run.safetensors")
    assert len(about["classes"]) == 4
    assert about["transform"]["interpolation"] == "bilinear"
    kept = read_weights(next(Path("run/checkpoints").glob(f"step-*/{AVERAGE}")))
    assert torch.equal(read_weights("run.safetensors")["norm.weight"], kept["norm.weight"])
    shown = vil("predict", "MODEL.MODEL_PATH=run.safetensors", "run/plots")
    assert shown.code == 0, shown.err
    taken = vil(
        "export", "MODEL.MODEL_PATH=run.safetensors", "--dynamic", "none", "--out", "run.pt2"
    )
    assert taken.code == 0, taken.err
    evaluated = [vil("evaluate", *words).out.splitlines()[-1] for words in (
        ["--run", "run"], [*FAKE, "MODEL.MODEL_PATH=run.safetensors", "--output_dir", "eval"],
        [*FAKE, "MODEL={MODEL_PATH: run.safetensors}", "--output_dir", "eval"],
    )]  # fmt: skip
    assert evaluated[0] == evaluated[1] == evaluated[2]
    for path in ("run", "run/checkpoints/best", "run/checkpoints/last"):
        assert package.load_weights(package.from_pretrained("run.safetensors"), path).complete


def test_a_checkpoint_has_the_config_and_the_classes_of_its_run():
    """REVERSIBLE and AVG_POOL change the function, not the shapes of the weights."""
    settings = ("OPTIM.EPOCHS=1", "MODEL.VIT.REVERSIBLE=True", "MODEL.VIT.AVG_POOL=False")
    succeeds("train", *TINY, *settings, "--output_dir", "run")
    succeeds("convert", "run", "run.safetensors")
    wanted = read_metadata("run.safetensors")
    assert wanted["model"]["reversible"]
    assert not wanted["model"]["avg_pool"]
    checkpoint = next(Path("run/checkpoints").glob("step-*"))
    for source in ("run/checkpoints/best", checkpoint, checkpoint / "model.safetensors"):
        succeeds("convert", source, "checkpoint.safetensors")
        found = read_metadata("checkpoint.safetensors")
        for name in ("model", "classes", "transform"):
            assert found[name] == wanted[name]
        rows = ("FINETUNE.HEAD=rows:rows.txt", "DATA.NUM_CLASSES=2")
        Path("rows.txt").write_text("3 1")
        succeeds("convert", source, "two.safetensors", *rows)
        names = read_metadata("two.safetensors")["classes"]
        assert names == [wanted["classes"][row] for row in (3, 1)]
        loaded = package.load_for_inference(source)
        assert loaded.cfg.MODEL.VIT.REVERSIBLE
        assert loaded.classes == wanted["classes"]


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        ("absent.pth out.safetensors", CHECKPOINT, "no weights at absent.pth"),
        ("best.pth out.pth", USAGE, r"TARGET out.pth: expected a .safetensors file or a folder"),
        ("best.pth out.safetensors --model vil_small", CHECKPOINT, "more mismatched"),
        ("best.pth o.safetensors --model vil_tiny SEED=1", USAGE, "leave out --config-file"),
        (
            "best.pth o.safetensors MODEL.ARCH=resnet18",
            USAGE,
            "cannot be converted: expected msvit",
        ),
        ("stranger.pth out.safetensors", CHECKPOINT, "The nearest model is vil_"),
        ("cut.pth out.safetensors", CHECKPOINT, r"damaged .*SHA-256 is [0-9a-f]{64}"),
        ("best.pth /proc/out.safetensors", CHECKPOINT, "cannot be written"),
        ("best.pth o.safetensors --classes two.txt", USAGE, "two.txt has 2 lines"),
        (
            "best.pth o.safetensors --config-file imagenet/vil_tiny.yaml FINETUNE.HEAD=new",
            USAGE,
            "would write a random head",
        ),
    ],
)
def test_what_cannot_be(words, code, pattern):
    torch.save({"conv1.weight": torch.ones(3)}, "stranger.pth")
    Path("two.txt").write_text("one\ntwo\n")
    Path("cut.pth").write_bytes(Path("best.pth").read_bytes()[:5000])
    ended = vil("convert", *words.split())
    assert ended.code == code, ended
    assert re.search(pattern, ended.err), ended.err
    assert ended.err.count("\n") <= 5 + 12  # of keys at most twelve lines; the rest is counted
    assert not Path("out.safetensors").exists()


def test_a_regression_keeps_the_scale_of_its_numbers(tmp_path):
    """In the order of the head, and also with a config that does not have it."""
    words = [*SMALL_TASKS["regression"], "OPTIM.EPOCHS=1"]
    succeeds("train", *words, "--output_dir", "run")
    mean = get_config("run/config.yaml").REGRESSION.MEAN
    Path("rows.txt").write_text("3 2 1 0")
    succeeds("convert", "run", "rows.safetensors", "FINETUNE.HEAD=rows:rows.txt")
    best = next(Path("run/checkpoints").glob("step-*"))
    Path("own.yaml").write_text(yaml.safe_dump({"TASK": "regression"}))
    succeeds("convert", best / "model.safetensors", "own.safetensors", *words)
    for file, expected in (("rows", mean[::-1]), ("own", mean)):
        settings = read_metadata(f"{file}.safetensors")["task"]["settings"]
        assert settings["REGRESSION.MEAN"] == pytest.approx(expected)


def test_published_weights_bring_their_transform(tmp_path):
    model = package.get_model("vil_tiny")
    torch.save(model.state_dict(), "tiny.pth")
    succeeds("convert", "tiny.pth", "t.safetensors", "--model", "ViL_Tiny_Weights.IMAGENET1K_V1")
    card = read_metadata("t.safetensors")
    assert card["transform"]["interpolation"] == "bicubic"
    assert len(card["classes"]) == 1000
