"""Pictures show what was found where it was found, in colours that all people tell apart."""

import numpy as np
import pytest
import torch
from PIL import Image

from vil.tasks.detection.detections import Detections, Mask
from vil.tasks.detection.visualize import (
    TINT,
    class_color,
    draw,
)
from vil.utils.image_text import MIN_SIZE

CLASSES = ["red", "blue", "grün 猫"]
GREY = (128, 128, 128)


def found(boxes, labels, masks=None, scores=None):
    scores = scores or [0.5] * len(labels)
    tensors = torch.tensor(boxes).reshape(-1, 4), torch.tensor(labels, dtype=torch.long)
    return Detections(*tensors, torch.tensor(scores), masks)


def grey(width, height):
    return Image.new("RGB", (width, height), GREY)


def test_a_box_is_drawn_where_it_is():
    picture = draw(grey(600, 500), found([[100.0, 200, 300, 400]], [2]), CLASSES)
    assert picture.size == (600, 500)
    pixels = np.asarray(picture)
    of_class = (pixels == class_color(2)).all(axis=-1)
    for x, y in [(100, 300), (299, 300), (200, 200), (200, 399)]:
        assert of_class[y, x]
    rest = (pixels != GREY).any(axis=-1)
    rest[200:400, 100:300] = False
    assert rest.any()  # the name, above the box
    assert not rest[400:].any()
    assert not rest[:170].any()


def test_a_mask_tints_its_pixels():
    mask = Mask(40, 60, np.eye(30) > 0)
    pixels = np.asarray(draw(grey(600, 500), found([[20.0, 300, 580, 480]], [1], [mask]), CLASSES))
    inside, beside_it = pixels[70, 50], pixels[70, 51]
    share = TINT / 255
    wanted = [share * c + (1 - share) * g for c, g in zip(class_color(1), GREY)]
    assert inside.tolist() == pytest.approx(wanted, abs=1)
    assert beside_it.tolist() == list(GREY)


def test_the_best_is_above_the_others():
    boxes = [[100.0, 200, 300, 400], [100.0, 200, 300, 400]]
    pixels = np.asarray(draw(grey(600, 500), found(boxes, [3, 1], scores=[0.9, 0.1]), CLASSES))
    assert tuple(pixels[300, 100]) == class_color(3)


@pytest.mark.parametrize("size", [(1, 1), (7, 8), (91, 83), (479, 3)])
def test_small_images_are_enlarged(size):
    boxes, masks = [[0.0, 0, *size]], [Mask(0, 0, np.ones(size[::-1], bool))]
    drawn = draw(grey(*size), found(boxes, [1], masks), CLASSES)
    factor = drawn.width // size[0]
    assert drawn.size == (factor * size[0], factor * size[1])
    assert MIN_SIZE <= max(drawn.size) < 2 * MIN_SIZE
    assert draw(grey(*size), found([], [], []), CLASSES).size == drawn.size
