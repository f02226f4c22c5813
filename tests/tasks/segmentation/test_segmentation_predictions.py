"""Predicted classes as text, JSON, images of class numbers and overlays."""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from vil.tasks.segmentation.predictions import (
    FORMATS,
    Prediction,
    decode_index,
    default_palette,
    draw_prediction,
    encode_index,
    index_image,
    overlay,
)
from vil.utils.errors import ConfigError
from vil.utils.image_text import MIN_SIZE
from vil.workflows.predict import PredictionFolder, is_drawn

NAMES = ["sea", "land", "a lake\n", "ice"]
CLASSES = np.array([[1, 1, 1, 0], [1, 1, 2, 0]], np.int16)
PALETTE = default_palette(4)
LAKES = Prediction("a.jpg", (2, 4), CLASSES, PALETTE)
BROKEN = Prediction("b.jpg", error="truncated")


def test_formats():
    """Classes with their share of the pixels, the most frequent first; absent ones are left out."""
    rows = json.loads("".join(FORMATS["json"]([LAKES, BROKEN], NAMES)))
    assert rows[0] == {
        "file": "a.jpg",
        "height": 2,
        "width": 4,
        "classes": [
            {"class": "land", "index": 1, "pixels": 5, "share": 0.625},
            {"class": "sea", "index": 0, "pixels": 2, "share": 0.25},
            {"class": "a lake\n", "index": 2, "pixels": 1, "share": 0.125},
        ],
    }
    assert rows[1] == {"file": "b.jpg", "error": "truncated", "classes": []}
    lines = "".join(FORMATS["text"]([LAKES, BROKEN], NAMES)).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["a.jpg:", "3", "classes"],
        ["land", "62.50", "%"],
        ["sea", "25.00", "%"],
    ]
    assert lines[-1] == "b.jpg: cannot be read: truncated"


def test_counts_stand_for_classes_that_are_not_in_memory():
    counted = Prediction("a.jpg", (2, 4), palette=PALETTE, counts=np.array([2, 5, 1, 0]))
    for write in FORMATS.values():
        assert list(write([counted], NAMES)) == list(write([LAKES], NAMES))


@pytest.mark.parametrize("num_classes", [4, 256, 257, 1000])
def test_index_images_have_the_class_numbers(num_classes, caplog):
    classes = np.random.default_rng(0).integers(0, num_classes, (7, 9)).astype(np.int16)
    classes[0, 0] = num_classes - 1
    palette = default_palette(num_classes)
    content = encode_index(classes, palette)
    assert np.array_equal(decode_index(content), classes)
    assert decode_index(content).dtype == np.int16
    image = index_image(classes, palette)
    if num_classes <= 256:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image.convert("RGB")), palette[classes])
        assert not caplog.records
    else:
        assert image.mode == "I;16"
        assert f"at most 256 colors, and there are {num_classes} classes" in caplog.text
        assert caplog.records[0].levelno == logging.WARNING


def test_default_colors_are_distinct():
    palette = default_palette(3000)
    assert palette.shape == (3000, 3)
    assert palette.dtype == np.uint8
    assert len(np.unique(palette, axis=0)) == 3000
    assert np.array_equal(default_palette(5), palette[:5])


@pytest.mark.parametrize("size", [(1, 1), (7, 8), (91, 83), (3, 479), (600, 500)])
def test_an_overlay_has_half_the_color_and_a_legend_below(size):
    """The size is (W, H). A small image is enlarged."""
    classes = np.zeros(size[::-1], np.int16)
    classes[-1, -1] = 3
    prediction = Prediction("a.png", size[::-1], classes, PALETTE)
    drawn = overlay(Image.new("RGB", size, (100, 100, 100)), prediction, NAMES)
    factor = -(-MIN_SIZE // max(size))
    height = factor * size[1]
    pixels = np.asarray(drawn).astype(int)
    shown = pixels[:height:factor, : factor * size[0] : factor]
    assert np.abs(2 * shown - PALETTE[classes].astype(int) - 100).max() <= 1
    legend = pixels[height:]
    for label in range(4):
        assert (legend == PALETTE[label]).all(axis=-1).any() == (label in classes)


def test_drawings_of_several_kinds(tmp_path):
    """They are marked, share a free number, and are replaced by a later command."""
    probabilities = np.random.default_rng(0).random((4, 2, 4)).astype(np.float16)
    prediction = Prediction("x/a.jpg", (2, 4), CLASSES, PALETTE, probabilities=probabilities)
    image = Image.new("RGB", (4, 2))
    outputs = ("overlay", "classes", "probabilities")
    for _ in range(2):
        folder = PredictionFolder(tmp_path)
        for name in ("x/a.jpg", "a-classes.png", "y/a.jpg"):
            folder.save(name, draw_prediction(image, prediction, NAMES, outputs))
    stems = ("a", "a-2", "a-classes-2")
    ends = (".png", "-classes.png", "-probabilities.npy")
    assert {p.name for p in tmp_path.iterdir()} == {stem + end for stem in stems for end in ends}
    assert all(is_drawn(file) for file in tmp_path.glob("*.png"))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a-classes.png")), CLASSES)
    assert np.array_equal(np.load(tmp_path / "a-2-probabilities.npy"), probabilities)


def test_only_what_is_asked_for_is_drawn(tmp_path):
    folder = PredictionFolder(tmp_path)
    image = Image.new("RGB", (4, 2))
    folder.save("a.jpg", draw_prediction(image, LAKES, NAMES, ["classes"]))
    assert [p.name for p in tmp_path.iterdir()] == ["a-classes.png"]
    image.save(tmp_path / "mine.png")
    with pytest.raises(ConfigError, match=r"did not draw, such as mine\.png"):
        PredictionFolder(tmp_path)


def test_index_images_of_many_classes_are_marked(tmp_path):
    many = Prediction("a.jpg", (2, 4), CLASSES, default_palette(300))
    drawings = draw_prediction(
        Image.new("RGB", (4, 2)), many, list(map(str, range(300))), ["classes"]
    )
    PredictionFolder(tmp_path).save("a.jpg", drawings)
    assert is_drawn(tmp_path / "a-classes.png")
