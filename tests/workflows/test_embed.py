"""Features of images: their file, their order, and what simple classifiers find in them."""

import csv

import numpy as np
import pytest
import torch

import vil
from tests.common.doc_pages import blocks
from tests.common.small_runs import draw_pictures
from tests.common.small_runs import vil as command
from vil.workflows.inference import shipped_weights


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return draw_pictures("photos", {"a": 2, "b": 3})


def test_the_head_of_the_model_maps_features_to_predictions(trained, photos):
    model = vil.load_for_inference(trained)
    features = vil.embed(model, photos, batch_size=2)
    assert (features.shape, features.dtype) == ((5, 32), np.float32)
    with torch.no_grad():
        found = model.model.head(torch.from_numpy(features)).softmax(-1)
    for row, prediction in zip(found, vil.predict(model, photos)):
        shares = [share for _, share in sorted(prediction.classes)]
        assert row.tolist() == pytest.approx(shares, abs=1e-5)


def test_a_file_of_features_and_a_table_of_names(trained, photos):
    for name in ("a/0.png", "a/1.png", "b/1.png"):  # a batch without any image, and one more
        (photos / name).write_bytes(b"")
    words = ["embed", "--run", trained, photos, "DATALOADER.BSZ=2", "--output-file", "features.npy"]
    ended = command(*words)
    assert ended.code == 0, ended.err
    written = "wrote 32 features of each of 5 images to features.npy, image names to features.csv"
    assert ended.out == f"{written}\n"
    assert "3 of 5 images could not be read: their rows are NaN" in ended.err
    features = np.load("features.npy")
    assert np.array_equal(features, vil.embed(trained, photos, batch_size=2), equal_nan=True)
    with open("features.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row["file"] for row in rows] == [str(path) for path in sorted(photos.rglob("*.png"))]
    assert [bool(row["error"]) for row in rows] == np.isnan(features).all(axis=1).tolist()


def test_a_probe_of_a_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command("embed", "--run", trained, "--probe")
    assert ended.code == 0, ended.err
    first, header, *rows = ended.out.splitlines()
    assert first == "32 features; train 64 images, fake 64 images"
    assert header.split() == ["classifier", "setting", "top1", "fake"]
    assert [row.split("  ")[0] for row in rows] == ["nearest neighbors"] * 2 + ["linear probe"]
    assert all(50 < float(row.split()[-1]) <= 100 for row in rows)


@pytest.mark.long
def test_the_numbers_of_the_guide(tmp_path, monkeypatch):
    """docs/guides/predict.md shows the shipped weights; an image or two hang on rounding."""
    monkeypatch.chdir(tmp_path)
    shown = next(b.code for b in blocks("docs/guides/predict.md") if b.language == "text")
    config, words = shipped_weights()
    ended = command("embed", "--config-file", config, *words, "--probe", "DEVICE=cpu")
    for line, found in zip(shown.splitlines(), ended.out.splitlines()[1:], strict=True):
        assert line.split("  ")[0] == found.split("  ")[0]
        if "top1" not in line:
            top1 = float(line.split()[-1]), float(found.split()[-1])
            assert top1[0] == pytest.approx(top1[1], abs=0.6)
