"""`vil predict --stream`: the prediction of the whole image, maps in files and one-line errors."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import vil as package
from tests.common.small_runs import vil

USAGE, DATA = 2, 3
SIZE = (211, 300)


@pytest.fixture
def photo(tmp_path):
    """A gray image of random pixels, for the shipped model of digits."""
    pixels = np.random.default_rng(0).integers(256, size=SIZE, dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture(scope="module")
def shipped():
    return package.load_for_inference(package.ViL_Nano_Weights.DIGITS, {"DEVICE": "cpu"})


def whole(shipped, photo):
    """(probabilities, maps (d, X, Y)) of the whole image."""
    pixels = torch.from_numpy(np.array(Image.open(photo).convert("RGB"))).movedim(2, 0) / 255
    mean, std = (torch.tensor(each) for each in (shipped.cfg.INPUT.MEAN, shipped.cfg.INPUT.STD))
    image = (pixels[None] - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        features, maps = shipped.model.forward_intermediates(image)
        logits = shipped.model.forward_head(features)
    return logits.softmax(1)[0].numpy(), [each[0].numpy() for each in maps]


@pytest.mark.long
def test_the_prediction_and_the_maps_of_the_whole_image(photo, shipped, tmp_path):
    tifffile, zarr = (pytest.importorskip(name) for name in ("tifffile", "zarr"))
    files = [tmp_path / name for name in ("a.npy", "b.zarr", "c.tif")]
    save = [f"--save=stages.{i}={file}" for i, file in enumerate(files)]
    for file in (files[0], files[2]):
        file.write_text("is replaced")
    zarr.open(str(files[1]), mode="w", shape=(3, 5), dtype="f4")
    scratch = tmp_path / "scratch"
    words = ["--format", "json", "--top", "all", "--scratch", scratch, "--memory", "32MiB"]
    ended = vil("predict", photo, "--stream", "--check", *words, *save)
    assert ended.code == 0, ended.err
    assert "a streamed crop differ from those of a normal forward pass by" in ended.err
    (row,) = json.loads(ended.out)
    found = {each["index"]: each["probability"] for each in row["classes"]}
    probabilities, maps = whole(shipped, photo)
    assert np.allclose([found[i] for i in range(10)], probabilities, atol=1e-6)
    with tifffile.TiffFile(files[2]) as file:
        assert file.is_bigtiff
        assert file.pages[0].is_tiled
    found = [np.load(files[0]), zarr.open(str(files[1]), mode="r")[:], tifffile.imread(files[2])]
    found[2] = found[2].transpose(2, 0, 1)
    for one, other in zip(found, maps):
        assert np.allclose(one, other, atol=1e-5 * np.abs(other).max())
    assert not list(scratch.iterdir())


@pytest.mark.long
def test_a_config_with_eval_fast_can_be_streamed(photo):
    ended = vil("predict", photo, "--stream", "EVAL.FAST=True")
    assert ended.code == 0, ended.err
    assert ended.out == vil("predict", photo, "--stream").out


@pytest.mark.long
def test_a_dry_run_prints_the_plan_and_reads_no_pixels(photo, tmp_path):
    image = Image.open(photo).resize((2000, 1500))
    image.save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:50_000])
    ended = vil("predict", tmp_path / "cut.jpg", "--stream", "--dry-run", "--memory", "200MiB")
    assert ended.code == 0, ended.err
    first, head, *rows = ended.out.splitlines()
    assert first.startswith("1500 x 2000 pixels in 200 MiB: peak ")
    assert head.split()[:4] == ["stage", "grid", "tokens", "passes"]
    assert [row.split()[0] for row in rows] == ["stages.0", "stages.1", "stages.2"]
    ended = vil("predict", tmp_path / "cut.jpg", "--stream")
    assert ended.code == DATA
    assert "cannot be read" in ended.err.splitlines()[-1]


@pytest.mark.long
def test_everything_that_does_not_fit_is_one_line(photo, tmp_path):
    (tmp_path / "folder.zarr").mkdir()
    large = tmp_path / "large.npy"
    np.lib.format.open_memmap(large, "w+", np.uint8, (30_000, 30_000, 3))  # a file with a hole
    one = tmp_path / "one.npy"
    double = [f"--save=stages.0={one}", f"--save=stages.1={tmp_path}/./one.npy"]
    wrong = {
        "--stream takes one image file": [photo, photo, "--stream"],
        "--memory needs --stream": [photo, "--memory", "1GiB"],
        "cannot be combined with --tta": [photo, "--stream", "--tta", "hflip"],
        "memory must be a number of bytes": [photo, "--stream", "--memory", "much"],
        "the smallest possible limit is": [photo, "--stream", "--memory", "9KiB"],
        "expected OUTPUT=FILE": [photo, "--stream", "--save", "map.npy"],
        "unknown output": [photo, "--stream", "--save", "stage=map.npy"],
        "another output is saved to the same file": [photo, "--stream", *double],
        "is a vector": [photo, "--stream", "--save", "logits=map.npy"],
        "is not a zarr array": [photo, "--stream", f"--save=stages.0={tmp_path / 'folder.zarr'}"],
        "the command reads this file": [large, "--stream", f"--save=stages.0={large}"],
        r"scratch .*photo.png": [photo, "--stream", "--scratch", photo],
        "cannot be streamed: full attention between": [large, "--stream"],
    }
    for message, words in wrong.items():
        ended = vil("predict", *words)
        assert ended.code == USAGE, (message, ended.err)
        assert re.search(message, ended.err.splitlines()[-1]), ended.err
    missing = {"no such file": tmp_path / "no.tif", "expected a name": tmp_path / "a.gif"}
    for message, path in missing.items():
        ended = vil("predict", "--images", path, "--stream")
        assert ended.code == DATA, ended.err
        assert re.search(message, ended.err.splitlines()[-1]), ended.err
