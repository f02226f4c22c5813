"""No output of a command replaces a file that it reads, nor one of a run."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.common.small_runs import checkpoint, draw_pictures, succeeds, vil
from vil.utils.errors import ConfigError
from vil.utils.output_paths import replacing

pytestmark = pytest.mark.trust(1)

USAGE = 2
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4]}],
    "categories": [{"id": 1, "name": "cat"}],
}


@pytest.fixture
def folder(tmp_path, trained, monkeypatch):
    """A copy of the run, two images, an annotation file and links to them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    Path("photos").mkdir()
    for name in ("img.png", "photos/a.png"):
        Image.new("RGB", (32, 32), (200, 30, 30)).save(name)
    Path("coco.json").write_text(json.dumps(COCO))
    Path("link.png").symlink_to("img.png")
    os.link("img.png", "hard.png")
    Path("weights").symlink_to(checkpoint("run").resolve())
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


DATA = "--data photos DATA.TRAIN=folder DATA.TEST=folder DATA.NUM_CLASSES=2"
LINES = {
    "annotations as the list of faults": "detect check coco.json --list coco.json",
    "image as predictions": "predict --run run img.png --output-file img.png",
    "image in a folder as predictions": "predict --run run photos --output-file photos/a.png",
    "image by a link as predictions": "predict --run run img.png --output-file link.png",
    "image by a hard link": "predict --run run img.png --output-file hard.png",
    "weights as predictions": "predict --run run img.png --output-file {weights}/model.safetensors",
    "weights by a linked folder": "predict --run run img.png --output-file weights/ema.txt",
    "another name in the checkpoints": "predict --run run img.png --output-file {weights}/new.txt",
    "config of the run": "predict --run run img.png --output-file run/config.yaml",
    "log of another run": "predict img.png --output-file run/metrics.jsonl",
    "class names": "predict img.png --classes names.txt --output-file names.txt",
    "image as its attention map": "visualize attention img.png --run run --out img.png",
    "image by a link as its map": "visualize attention img.png --run run --out link.png",
    "pattern in the checkpoints": "visualize pattern --grid 8 --window 4 --out {weights}/p.png",
    "page in the checkpoints": "report run --no-eval --out run/checkpoints/page.html",
    "drawn images in the checkpoints": "predict --run run img.png --output run/checkpoints/drawn",
    "config as the manual": "config --config-file mine.yaml --docs mine.yaml",
    "model over its own file": "convert model.safetensors model.safetensors",
    "export over the weights": "export --run run --out {weights}/model.onnx",
    "results of a benchmark": "benchmark attention --grid 4 --window 2 --out run/checkpoints",
    "a folder without a name": "convert run ''",
    "a training image as the sheet": f"data check {DATA} --sheet photos/train/cat/0.png",
    "a training image as the result": f"data check {DATA} --json photos/train/dog/0.png",
    "the table of labels as the result": f"data check {DATA} --json photos/labels.csv",
    "sheet and result in one file": f"data check {DATA} --sheet a.png --json a.png",
    "a table beside the features": "embed --run run img.png --output-file names.npy",
    "an int8 file beside the export": "export --run run --out other.onnx --int8",
    "the weights of another library": "convert run hub",
    "the config of another library": "convert run hub_config",
    "drawings among the images": "predict --run run photos/train/cat --output photos/train/cat",
    "drawings in another class": "predict --run run img.png --output photos/train/dog",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_an_output_never_replaces_an_input(folder, line):
    Path("names.txt").write_text("".join(f"{n}\n" for n in range(10)))
    Path("mine.yaml").write_text("_BASE_: digits/vil_nano.yaml\n")
    draw_pictures("photos/train", {"cat": 2, "dog": 2})
    draw_pictures("photos/val", {"cat": 1, "dog": 1})
    for file in ("photos/labels.csv", "names.csv", "other.int8.onnx", "hub_config/config.json"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("{}")
    save_file({"weight": torch.zeros(1)}, Path("hub.safetensors"))
    Path("hub").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy("hub.safetensors", f"hub/{file}")
    package = Path(vil.__globals__["__file__"]).parents[2]
    shutil.copy(package / "vil/weights/vil_nano_digits.safetensors", "model.safetensors")
    before = contents(folder)
    ended = vil(*shlex.split(line.format(weights=checkpoint("run"))))
    assert ended.code == USAGE, ended
    assert ended.err.splitlines()[-1].startswith("vil "), ended.err
    assert contents(folder) == before


def listed_entries() -> list[str]:
    """The files and folders of a run that docs/reference/run_folder.md lists."""
    page = Path(__file__).parents[2] / "docs/reference/run_folder.md"
    block = page.read_text().split("```")[1]
    return re.findall(r"^  ([\w.]+/?) ", block, re.MULTILINE)


@pytest.mark.parametrize("entry", listed_entries())
def test_no_entry_of_a_run_is_replaced(folder, entry):
    """Also if the run has no such file yet, because later commands would read it."""
    out = f"run/{entry}x.txt" if entry.endswith("/") else f"run/{entry}"
    Path(out).parent.mkdir(exist_ok=True)
    before = contents(folder)
    ended = vil("predict", "--run", "run", "img.png", "--output-file", out)
    if entry == "report.html":  # written for people, and never read again
        assert ended.code == 0, ended.err
        return
    assert ended.code == USAGE, ended
    assert contents(folder) == before


@pytest.mark.parametrize(
    "line",
    [
        "embed --run run img.png --output-file new.npy",
        "convert run new",
        f"data check {DATA} --sheet new.png --json new.json",
        "predict --run run img.png --output new",
    ],
)
def test_a_command_may_replace_what_it_wrote(folder, line):
    draw_pictures("photos/train", {"cat": 2, "dog": 2})
    draw_pictures("photos/val", {"cat": 1, "dog": 1})
    for _ in range(2):
        ended = vil(*line.split())
        assert ended.code == 0, ended.err


def test_a_folder_with_a_config_is_not_always_a_run(folder):
    Path("config.yaml").write_text("_BASE_: digits/vil_nano.yaml\n")
    Path("plots").mkdir()
    words = ("visualize", "pattern", "--grid", "8", "--window", "4", "--out", "plots/p.png")
    assert vil(*words).code == 0


def test_another_checkpoint_does_not_replace_the_results_of_the_best(folder):
    shutil.copytree(checkpoint("run"), "run/checkpoints/step-00000001")
    Path("run/checkpoints/last").write_text("step-00000001")
    succeeds("evaluate", "--run", "run")
    best = Path("run/eval/results.json")
    before = best.read_bytes(), best.stat().st_mtime_ns
    succeeds("evaluate", "--run", "run", "--checkpoint", "last")
    weights = checkpoint("run", "best") / "model.safetensors"
    shutil.copy(weights, "other.safetensors")
    succeeds("evaluate", "--run", "run", "MODEL.MODEL_PATH=other.safetensors")
    assert (best.read_bytes(), best.stat().st_mtime_ns) == before
    assert Path("run/eval/step-00000001/results.json").is_file()
    assert Path("run/eval/other/results.json").is_file()


def test_an_existing_output_is_replaced_at_the_end(folder):
    Path("out.csv").write_text("old")
    words = ("predict", "--run", "run", "img.png", "--format", "csv", "--output-file", "out.csv")
    assert vil(*words).code == 0
    assert Path("out.csv").read_text().startswith("file,rank")
    assert [file.name for file in folder.iterdir() if "out" in file.name] == ["out.csv"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "out.txt"
    file.write_text("old")

    def fail():
        with replacing(file) as aside:
            aside.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
