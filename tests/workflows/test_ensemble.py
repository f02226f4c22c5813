"""Averages over views and runs: what is averaged, with which transform, and what cannot be."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vil
from tests.common.saved_runs import copy_run
from tests.common.small_runs import TINY, draw_pictures
from tests.common.small_runs import vil as command
from vil.data.image import read_image
from vil.tasks.image.labels import Labels
from vil.tasks.image.task import ImageTask
from vil.utils.errors import ConfigError, DataError
from vil.workflows.ensemble import Ensemble, make_ensemble

ONE = [*TINY, "OPTIM.EPOCHS=1", "OPTIM.LR=0.1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of four classes: two for images of 32 pixels, one for 48 pixels with another mean."""
    folder = tmp_path_factory.mktemp("ensemble")
    own = (["SEED=1"], ["SEED=2"], ["SEED=3", "INPUT.IMAGE_SIZE=48", "INPUT.MEAN=[0.1, 0.2, 0.3]"])
    for number, words in enumerate(own):
        vil.train(None, [*ONE, *words], output_dir=folder / f"run{number}")
    return folder


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = draw_pictures("photos", {"a": 2, "b": 1})
    gradient = np.linspace(0, 255, 60 * 40 * 3).reshape(40, 60, 3).astype(np.uint8)
    Image.fromarray(gradient).save(folder / "c.png")
    return folder


def shares(prediction):
    """Probabilities (K,) by class."""
    return np.array([share for _, share in sorted(prediction.classes)])


def predicted(source, images, **options):
    return np.stack([shares(p) for p in vil.predict(source, images, batch_size=2, **options)])


def test_runs_are_averaged_each_with_its_transform(runs, photos):
    names = [runs / f"run{number}" for number in range(3)]
    single = np.stack([predicted(name, photos) for name in names])
    mean = single.astype(np.float64).mean(axis=0).astype(np.float32)
    assert not np.allclose(single[0], single[2])
    assert np.array_equal(predicted(names, photos), mean)
    assert np.array_equal(predicted(str(runs / "run*"), photos), mean)
    loaded = [vil.load_for_inference(name) for name in names]
    assert np.array_equal(predicted(loaded, photos), mean)


def test_views_are_averaged(runs, photos):
    model = vil.load_for_inference(runs / "run0")
    images = [read_image(p) for p in sorted(photos.rglob("*.png"))]
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    mean = (predicted(model, images) + predicted(model, mirrored)) / 2
    found = predicted(model, photos, tta="hflip")
    assert found == pytest.approx(mean, abs=1e-5)
    assert not np.array_equal(found, predicted(model, photos))
    assert np.array_equal(predicted(model, photos, tta=2), found)
    assert np.array_equal(predicted(model, photos, tta=1), predicted(model, photos))
    both = predicted([runs / "run0", runs / "run1"], photos, tta="crops")
    each = [predicted(runs / name, photos, tta="crops") for name in ("run0", "run1")]
    assert both == pytest.approx(np.mean(each, axis=0), abs=1e-6)


def test_thresholds_are_averaged_without_changing_the_models():
    tasks = [
        ImageTask(Labels(2, thresholds=pair), device=torch.device("cpu"))
        for pair in ([0.2, 0.4], [0.6, 0.8])
    ]
    for order in (tasks, tasks[::-1]):
        combined = Ensemble([SimpleNamespace(task=task) for task in order]).task
        assert combined.target.thresholds.tolist() == pytest.approx([0.4, 0.6])
    assert tasks[0].target.thresholds.tolist() == [0.2, 0.4]


def test_models_of_other_classes_are_refused(runs, photos, tmp_path):
    other = [*ONE, "DATA.NUM_CLASSES=3", "DATA.KWARGS={n: 64, size: 32, num_classes: 3}"]
    vil.train(None, other, output_dir="three")
    ended = command("predict", "--run", runs / "run0", "--run", "three", photos)
    assert (ended.code, ended.out) == (2, "")
    for part in (
        "the first model has 4 classes, this one has 3",
        "3 missing: hue 90, hue 180, hue 270",
        "2 unknown: hue 120, hue 240",
    ):
        assert part in ended.err
    models = [vil.load_for_inference(runs / f"run{number}") for number in (0, 1)]
    models[1].classes = list(models[1].classes)[::-1]
    with pytest.raises(ConfigError, match="the order differs from class 0 on"):
        make_ensemble(models)


def test_models_that_read_images_differently_are_refused(runs):
    models = [
        vil.load_for_inference(runs / "run0"),
        vil.load_for_inference(runs / "run1", {"DATA.VALUE_RANGE": "[0, 4095]"}),
    ]
    with pytest.raises(ConfigError, match=r"the same DATA.VALUE_RANGE, .* model 2 "):
        make_ensemble(models)
    with pytest.raises(ConfigError, match="no model to load"):
        vil.predict([], "photos")
    with pytest.raises(DataError, match="no images to predict"):
        vil.predict(models[:1], [])


@pytest.mark.detection
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tta hflip", "cannot be averaged, so leave out --tta"),
        ("--run again", "cannot be averaged, so leave out --tta and give one run"),
        ("--threshold 0.5", "set DETECTION.TEST.SCORE"),
    ],
)
def test_detectors_are_refused(photos, words, message):
    copy_run("detector", Path("scenes"))
    copy_run("detector", Path("again"))
    ended = command("predict", "--run", "scenes", photos, *words.split())
    assert (ended.code, ended.out) == (2, "")
    assert "this config is for a detector" in ended.err
    assert message in ended.err


def test_a_threshold_leaves_probable_classes(runs, photos):
    words = ["predict", "--run", runs / "run0", photos, "--top", "all"]
    rows = json.loads(command(*words, "--format", "json").out)
    every = [[row["probability"] for row in record["classes"]] for record in rows]
    limit = sorted(p[0] for p in every)[1] + 1e-4  # two images have no class above it
    words += ["--threshold", f"{limit:.9f}"]
    found = json.loads(command(*words, "--format", "json").out)
    kept = [[row["probability"] for row in record["classes"]] for record in found]
    assert kept == [[p for p in shares if p >= limit] for shares in every]
    empty = [record["file"] for record in found if not record["classes"]]
    assert len(empty) >= 2
    table = command(*words).out.splitlines()
    assert [line.split()[0] for line in table if " none " in line] == empty
    lines = list(csv.DictReader(io.StringIO(command(*words, "--format", "csv").out)))
    assert [line["file"] for line in lines if not line["class"] and not line["error"]] == empty


@pytest.mark.long
def test_probabilities_have_a_column_per_class(runs, photos):
    (photos / "a/broken.png").write_bytes(b"")
    words = ["predict", "--run", runs / "run*", photos, "--format", "probabilities"]
    assert command(*words, "--output-file", "all.csv", "--tta", "3").out == ""
    with open("all.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "hue 0", "hue 90", "hue 180", "hue 270", "error"]
    assert [row["file"] for row in rows] == [str(p) for p in sorted(photos.rglob("*.png"))]
    for row in rows:
        cells = [row[name] for name in list(row)[1:5]]
        if row["error"]:
            assert (row["file"], cells) == ("photos/a/broken.png", [""] * 4)
        else:
            assert sum(map(float, cells)) == pytest.approx(1, abs=1e-6)
