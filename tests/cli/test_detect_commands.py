"""`vil evaluate` and `vil predict`: a run of one epoch, judged and asked."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.common.small_runs import results, vil
from vil.tasks.detection.coco_eval import average_precision, decode_rle
from vil.tasks.detection.data.datasets import CocoDataset, build_detection_set

USAGE = 2
SMALL = (
    "--config-file", "scenes/mask_rcnn_vil_nano.yaml", "DATA.KWARGS={train: 16, val: 5}",
    "OPTIM.EPOCHS=1", "DEVICE=cpu", "DETECTION.TEST.SCORE=0.0", "DETECTION.TEST.PER_IMAGE=12",
    "DETECTION.BOX.SAMPLES=64",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps; it knows little, but what it knows is the same each time."""
    place = tmp_path_factory.mktemp("detect")
    ended = vil("train", *SMALL, "--data", place / "data", "--output_dir", place / "run")
    assert ended.code == 0, ended.err
    return place / "run"


@pytest.fixture(scope="module")
def evaluated(run):
    """What `vil evaluate` printed; its results lie in the run's folder."""
    ended = vil("evaluate", "--run", run)
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture
def photos(run):
    """The five images of the test set."""
    (folder,) = (run.parent / "data").glob("*/val")
    return folder


def predicted(run, *words):
    """What the command prints as JSON."""
    ended = vil("predict", "--run", run, "--format", "json", *words)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


# Evaluation


def test_metrics_and_files_agree(run, evaluated):
    assert re.search(r"^val set scenes box_ap \d+\.\d\d box_ap50 .*mask_ar100 .*count 5$",
                     evaluated.out, re.MULTILINE)  # fmt: skip
    figures = results(run)["scenes"]
    rows = json.loads((run / "eval/scenes_bbox.json").read_text())
    annotations = next((run.parent / "data").glob("*/annotations/*val*.json"))
    again = average_precision(annotations, rows)
    for name in ("box_ap", "box_ap50", "box_ar100"):
        assert figures[name] == again[name]
    assert math.isnan(again["box_ap_l"])  # no object is that large
    assert figures["box_ap_l"] is None
    assert set(figures["per_class"]) == {"box_ap", "mask_ap"}


def test_the_worst_images_are_drawn_and_every_class_is_a_line_if_requested(run):
    """Images of an evaluation before are removed."""
    assert vil("evaluate", "--run", run, "--pictures", 3).code == 0
    words = ("--run", run, "--pictures", 2, "OUTPUT_PERCLASS_ACC", "True")
    ended = vil("evaluate", *words)
    assert f"2 images with the most errors: see {run}/eval/pictures" in ended.out
    drawn = sorted(path.name for path in (run / "eval/pictures").iterdir())
    assert [name[:9] for name in drawn] == ["scenes-1-", "scenes-2-"]
    for name in drawn:
        assert Image.open(run / "eval/pictures" / name).width > 900  # two enlarged images
    lines = [line.split() for line in ended.out.splitlines()]
    start = lines.index(["class", "box_ap", "mask_ap"]) + 1
    table = lines[start : start + 10]
    assert [line[0] for line in table] == [str(digit) for digit in range(10)]
    assert all(re.fullmatch(r"\d+\.\d\d|nan", cell) for line in table for cell in line[1:])


# Prediction


def test_the_score_of_a_run_or_a_config_is_used(run, photos, tmp_path):
    """Without one, people see detections of 0.5 or more. Results to evaluate have all of them."""
    image = next(photos.iterdir())
    copy = shutil.copytree(run, tmp_path / "run")
    text = (copy / "config.yaml").read_text()
    every = [each["score"] for each in predicted(run, image, "--score", "0")[0]["objects"]]
    score = sorted(every)[-2] + 1e-4
    (copy / "config.yaml").write_text(re.sub(r"SCORE: .*", f"SCORE: {score}", text))
    assert len(predicted(copy, image)[0]["objects"]) == 1 < len(every)
    words = ("predict", "--run", copy, image, "--format", "coco")
    assert vil(*words).out == vil(*words, "--score", score).out != vil(*words, "--score", "0").out


@pytest.mark.usefixtures("evaluated")
def test_predictions_are_those_of_evaluation(run, photos):
    """The same boxes, to the last digit, from the same images."""
    rows = json.loads((run / "eval/scenes_bbox.json").read_text())
    found = predicted(run, photos, "--score", "0")
    dataset = build_detection_set(
        "scenes", run.parent / "data", "val", masks=False, train=16, val=5
    )
    assert [Path(record["file"]).name for record in found] == sorted(
        dataset.sample_name(i) for i in range(5)
    )
    ids = {dataset.sample_name(i): int(dataset.image_ids[i]) for i in range(5)}
    assert sum(len(record["objects"]) for record in found) == len(rows) > 0
    for record in found:
        own = [row for row in rows if row["image_id"] == ids[Path(record["file"]).name]]
        for thing, row in zip(record["objects"], own):
            assert thing["score"] == pytest.approx(row["score"], abs=1e-5)
            assert dataset.category_ids[thing["label"] - 1] == row["category_id"]
            assert thing["class"] == dataset.classes[thing["label"] - 1]
            x1, y1, x2, y2 = thing["box"]
            assert [x1, y1, x2 - x1, y2 - y1] == pytest.approx(row["bbox"], abs=1e-3)


def test_formats_agree(run, photos):
    Path("broken.png").write_bytes(b"not a picture")
    Image.new("RGB", (90, 70)).save("other.png")  # not of the test set: coco is a file of its own
    words = ["--run", run, "--score", "0.1", "--images", photos]
    words += [Path("other.png").resolve(), "broken.png"]
    shown = {name: vil("predict", "--format", name, *words)
             for name in ("text", "json", "coco")}  # fmt: skip
    assert {ended.code for ended in shown.values()} == {0}
    *whole, broken = json.loads(shown["json"].out)
    assert broken.keys() == {"file", "objects", "error"}
    things = [thing for record in whole for thing in record["objects"]]
    assert things
    lines = shown["text"].out.splitlines()
    assert lines[-1].startswith("broken.png: cannot be read: ")
    assert sum(line.startswith("  ") for line in lines) == len(things)
    assert f"{whole[0]['file']}: {len(whole[0]['objects'])} object" in lines[0]
    coco = json.loads(shown["coco"].out)
    assert [image["file_name"] for image in coco["images"]] == [r["file"] for r in whole]
    assert [(row["category_id"], row["score"]) for row in coco["annotations"]] == [
        (thing["label"], thing["score"]) for thing in things
    ]
    for row in coco["annotations"]:  # of the mask, not of its box
        assert row["area"] == decode_rle(row["segmentation"]).sum()
    Path("found.json").write_text(shown["coco"].out)  # a set like any other
    again = CocoDataset("/", "found.json", "val", masks=True)
    assert sum(len(again[index][1]["labels"]) for index in range(6)) == len(things)
    assert [row["name"] for row in coco["categories"]] == [str(digit) for digit in range(10)]


def test_drawn_images_have_names_of_their_own(run, photos):
    """They do not replace each other, and the run is not written to."""
    Path("mine").mkdir()
    Image.open(sorted(photos.iterdir())[0]).save("mine/a.png")
    Image.open(sorted(photos.iterdir())[1]).save("mine/a.jpg")
    for _ in range(2):  # drawn images may be replaced
        assert len(predicted(run, "mine", "--output", "two")) == 2
        assert sorted(p.name for p in Path("two").iterdir()) == ["a-2.png", "a.png"]
    predicted(run, "--output", "drawn", "--score", "0.1", sorted(photos.iterdir())[0])
    assert np.asarray(Image.open("drawn/000001.png")).std() > 0
    assert not (Path(run) / "drawn").exists()


def test_a_large_image_in_tiles(run, photos):
    """A scene in the corner of a dark image of many tiles; one that fits in a tile is not split."""
    scene = Image.open(sorted(photos.iterdir())[0]).convert("RGB")
    large = Image.new("RGB", (1000, 700))
    large.paste(scene, (0, 0))
    large.save("large.png")
    tiles = ["--tile", "400", "--overlap", "100", "--score", "0"]
    (record,) = predicted(run, "large.png", *tiles)
    assert (record["width"], record["height"]) == (1000, 700)
    assert 0 < len(record["objects"]) <= 12
    boxes = np.array([thing["box"] for thing in record["objects"]])
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 1000
    assert boxes[:, 3].max() <= 700
    scene.save("small.png")
    whole = predicted(run, "small.png", "--score", "0")
    assert predicted(run, "small.png", *tiles) == whole


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (
            "predict --overlap 10 x.png",
            USAGE,
            "an overlap needs tiles: set DETECTION.TEST.TILE",
        ),
        (
            "predict --tile 64 --overlap 64 x.png",
            USAGE,
            "must be smaller than the tile",
        ),
        ("predict --tile -1 x.png", USAGE, "DETECTION.TEST.TILE: expected at least 0"),
        ("predict --score 1.5 x.png", USAGE, r"DETECTION\.TEST\.SCORE"),
        ("predict --output file file", USAGE, "--output file: File exists"),
    ],
)
def test_command_lines_that_cannot_be(run, words, code, pattern):
    Path("file").touch()
    command, *words = words.split()
    ended = vil(command, "--run", run, *words)
    assert (ended.code, ended.out) == (code, "")
    assert re.search(pattern, ended.err), ended.err


def test_formats_and_flags_of_another_task(run):
    ended = vil("predict", "--run", run, "--format", "csv", "x.png")
    assert ended.code == USAGE
    assert "--format csv: choose from text, json, coco for a detector" in ended.err
    ended = vil("predict", "--tile", "32", "--sample")
    assert "the model of this config is a classifier, which does not support --tile" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ["export", "--run", "RUN", "--out", "model.onnx", "--int8"],
        ["convert", "RUN", "model.safetensors"],
        ["benchmark", "model", *SMALL[:2]],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_commands_for_images_of_one_size_say_so(run, words):
    ended = vil(*(str(run) if word == "RUN" else word for word in words))
    assert ended.code == USAGE
    assert "this config is for a detector: " in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not list(Path().iterdir())
