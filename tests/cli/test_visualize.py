"""`vil visualize` draws what tokens see, and says in one line what it cannot draw."""

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread
from PIL import Image

from tests.common.small_runs import TINY, vil
from vil import predict

USAGE, DATA = 2, 3
ARCH = "MODEL.VIT.MSVIT.ARCH="
FEW = (*TINY, "DATA.KWARGS.n=16")


@pytest.fixture
def photo():
    Image.linear_gradient("L").resize((40, 36)).save("photo.png")
    return "photo.png"


def drawn(*words, out="attention.png"):
    """Return the image that a command draws, and its stderr."""
    said = said_of(*words, out=out)
    return imread(out), said


def said_of(*words, out="attention.png"):
    """What a command that draws says on stderr."""
    ended = vil("visualize", *words)
    assert (ended.code, ended.out) == (0, f"{out}\n"), ended.err
    return ended.err


@pytest.fixture
def shown(monkeypatch):
    """The images and titles of the plots, which are not drawn."""
    seen = []

    def draw(image, rows, title, aside):
        seen.append((image, title))
        aside.touch()

    monkeypatch.setattr("vil.workflows.visualize.draw_attention", draw)
    return seen


def test_a_numbered_image_is_of_the_test_set(trained, shown):
    for split, value in (("train", 128), ("val", 0), ("test", 255)):
        for name in ("hue 0", "hue 90", "hue 180", "hue 270"):
            Path("data", split, name).mkdir(parents=True)
            Image.new("RGB", (32, 32), (value,) * 3).save(f"data/{split}/{name}/0.png")
    sets = [f"DATA.{key}=[folder]" for key in ("TRAIN", "VAL", "TEST")]
    said_of("attention", "test:0", "--run", trained, "--data", "data", "DATA.KWARGS={}", *sets)
    assert shown[0][0].min() > 0.9


def test_the_probability_is_that_of_vil_predict(trained, photo, shown):
    shutil.copytree(trained, "calibrated", symlinks=True)
    said_of("attention", photo, "--run", "calibrated")
    assert vil("evaluate", "--run", "calibrated", "--calibrate").code == 0
    (expected,) = predict("calibrated", photo)
    said_of("attention", photo, "--run", "calibrated", "EVAL.FAST=True")
    assert shown[1][1].endswith(f", {expected.classes[0][1]:.1%}")
    assert shown[0][1] != shown[1][1]


def test_rows_are_tokens_and_global_tokens_of_the_stages(trained, photo):
    """Two stages with a global token each: four rows, two, one."""
    heights = [
        drawn("attention", photo, "--run", trained, *words)[0].shape[0]
        for words in ([], ["--only", "token"], ["--stage=2", "--block=1", "--only", "global"])
    ]
    assert heights[0] - heights[1] == 2 * (heights[1] - heights[2]) > 0


def test_another_token_sees_something_else(trained, photo):
    words = ("attention", photo, "--run", trained, "--stage", 1, "--only", "token")
    first, _ = drawn(*words, "--token", "3,3", "--out", "1.png", out="1.png")
    same, _ = drawn(*words, "--token", "0,0", "--out", "2.png", out="2.png")
    other, _ = drawn(*words, "--token", "0,4", "--out", "3.png", out="3.png")
    assert (first == same).all()  # two pixels of one patch
    assert (first != other).any()


def test_an_attention_without_maps_is_left_out(photo):
    """Where all have none, it is refused."""
    mixed = [*FEW, "MODEL.VIT.MSVIT.ATTN_TYPE=linformer"]
    assert vil("train", *mixed, "OPTIM.EPOCHS=1", "--output_dir", "mixed").code == 0
    _, said = drawn("attention", photo, "--run", "mixed")
    assert "left out: stage 1: linformer attention has no attention map" in said
    ended = vil("visualize", "attention", photo, "--run", "mixed", "--stage", 1)
    assert ended.code == USAGE
    assert re.search(r"attention: stage 1: linformer .* weights of both signs\n$", ended.err)


@pytest.mark.parametrize("image", ["nowhere.png", "test:64"])
def test_an_image_that_is_not_there(trained, image):
    refused(vil("visualize", "attention", image, "--run", trained), DATA, image)


def test_models_of_others_are_refused(photo):
    foreign = [*FEW, "MODEL.ARCH=timm/resnet10t", "OPTIM.EPOCHS=1"]
    assert vil("train", *foreign, "--output_dir", "foreign").code == 0
    refused(vil("visualize", "attention", photo, "--run", "foreign"), USAGE, "not for other models")


def refused(ended, code, message):
    assert (ended.code, ended.out) == (code, "")
    last = ended.err.splitlines()[-1]
    assert message in last, ended.err
