"""`vil export` writes what `vil evaluate` judges; what cannot be is one line and a code."""

import json
import re
from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import Image

from tests.common.small_runs import TINY, checkpoint, draw_pictures, results, vil
from vil.export import load_exported

USAGE, DATA = 2, 3
SHIFT = "MODEL.VIT.MSVIT.MODE=1"  # in evaluation all nine chunks, so in files too


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one epoch, of four classes, with random shift."""
    folder = tmp_path_factory.mktemp("export") / "run"
    words = ("OPTIM.EPOCHS=1", "OPTIM.LR=0.1", SHIFT, "AMP.ENABLED=True")
    ended = vil("train", *TINY, *words, "--output_dir", folder)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    """The run as ONNX and in int8, and what the command printed."""
    path = tmp_path_factory.mktemp("written") / "small.onnx"
    ended = vil("export", "--run", run, "--out", path, "--int8", "--check")
    assert (ended.code, ended.err) == (0, "")
    return path, ended.out


@pytest.mark.long
def test_files_are_judged_beside_the_model(run, written):
    path, said = written
    assert vil("evaluate", "--run", run, "AMP.ENABLED=False").code == 0
    wanted = results(run)["fake"]
    judged = re.findall(r"^val set fake (\S+) +loss (\S+) top1 (\S+)", said, flags=re.MULTILINE)
    assert [name for name, *_ in judged] == ["model", "small.onnx", "small.int8.onnx"]
    assert {(loss, top1) for _, loss, top1 in judged[:2]} == {
        (f"{wanted['loss']:.4f}", f"{wanted['top1']:.2f}")
    }
    differences = re.findall(r"outputs differ .* at most (\S+) for image shape (.+)", said)
    assert [images for _, images in differences] == [
        "1 x 3 x 32 x 32", "3 x 3 x 23 x 32", "2 x 3 x 36 x 40",
    ]  # fmt: skip
    assert max(float(largest) for largest, _ in differences) <= 1e-4
    sizes = dict(re.findall(r"^(\S+): (\S+) MiB", said, flags=re.MULTILINE))
    assert float(sizes[str(path)]) > float(sizes[str(path.with_name("small.int8.onnx"))]) > 0
    assert re.search(r"^10 linear layers in int8$", said, flags=re.MULTILINE)


@pytest.mark.long
def test_the_file_needs_nothing_else(run, written):
    """Classes and normalisation are in it; the logits are those behind `vil predict`."""
    session = onnxruntime.InferenceSession(written[0], providers=["CPUExecutionProvider"])
    notes = session.get_modelmeta().custom_metadata_map
    assert json.loads(notes["classes"]) == ["hue 0", "hue 90", "hue 180", "hue 270"]
    mean, std = (torch.tensor(json.loads(notes[key]))[:, None, None] for key in ("mean", "std"))
    pictures = draw_pictures("photos", {"a": 3})
    told = vil("predict", "--run", run, "AMP.ENABLED=False", "INPUT.CROP_PCT=1.0",
               "--format", "json", "--images", pictures)  # fmt: skip
    for number, record in enumerate(json.loads(told.out)):
        colour = torch.tensor([40 * number, 100, 50])[:, None, None] / 255  # the whole picture
        images = ((colour - mean) / std).expand(3, 32, 32)[None].numpy()
        shares = torch.from_numpy(session.run(["logits"], {"images": images})[0]).softmax(-1)[0]
        for row in record["classes"]:
            assert shares[row["index"]].item() == pytest.approx(row["probability"], abs=1e-4)


@pytest.mark.long
def test_a_program_of_torch_from_a_config_and_weights(run):
    words = ("--dynamic", "none", "--size", "32x32", "--check", SHIFT)
    ended = vil("export", *TINY, "MODEL.MODEL_PATH", checkpoint(run), "--out", "m.pt2", *words)
    assert (ended.code, ended.err) == (0, "")
    judged = re.findall(r"^val set fake \S+ +(loss .+)$", ended.out, flags=re.MULTILINE)
    assert len(judged) == 2
    assert len(set(judged)) == 1
    file = load_exported("m.pt2")
    assert file(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert file.metadata["dynamic"] == "none"
    assert json.loads(file.metadata["classes"]) == ["hue 0", "hue 90", "hue 180", "hue 270"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"": 15}, "--calibration images: expected a folder with at least 16 images, got 15"),
        (
            {"hue 0": 10, "hue 90": 8, "owl": 1},
            "--calibration images: the model has no classes for the subfolders owl: rename or "
            "remove them (classes: hue 0, hue 90, hue 180, hue 270)",
        ),
    ],
)
def test_calibration_images_that_cannot_be(run, files, said):
    """They are refused before the model is exported."""
    for folder, count in files.items():
        draw_images(Path("images", folder), count)
    ended = vil("export", "--run", run, "--out", "m.onnx", "--int8", "--calibration", "images")
    assert ended.code == USAGE
    assert said in ended.err
    assert not Path("m.onnx").exists()


@pytest.mark.long
def test_static_int8_from_a_folder(run):
    """Broken images are left out; too few others are an error."""
    draw_images(Path("images"), 17)
    Path("images/broken.png").write_bytes(b"")
    words = ("export", "--run", run, "--out", "m.onnx", "--int8", "--calibration", "images")
    ended = vil(*words, "--check")
    assert ended.code == 0, ended.err
    assert "10 linear layers in int8" in ended.out
    judged = dict(re.findall(r"^val set fake (\S+) +loss (\S+)", ended.out, flags=re.MULTILINE))
    assert float(judged["m.int8.onnx"]) == pytest.approx(float(judged["model"]), abs=0.05)
    Path("images/0.png").write_bytes(b"")
    Path("images/1.png").write_bytes(b"")
    ended = vil(*words[:4], "other.onnx", *words[5:])
    assert ended.code == DATA
    assert "--calibration: only 15 of 18 images can be read" in ended.err
    assert not Path("other.onnx").exists()


def draw_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (32, 32), (8 * number, 100, 200)).save(folder / f"{number}.png")


@pytest.mark.long
def test_packages_of_aotinductor(run):
    ended = vil("export", "--run", run, "--out", "m.pt2", "--to", "aoti", "--dynamic", "none")
    assert ended.code == 0, ended.err
    file = load_exported("m.pt2")
    assert file.metadata["input_size"] == "32x32"
    assert file(torch.randn(1, 3, 32, 32)).shape == (1, 4)
