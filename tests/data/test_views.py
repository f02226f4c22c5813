"""Views for test-time augmentation: which ones a word names, and which pixels they have."""

import numpy as np
import pytest
from PIL import Image

from vil.data.transforms import eval_transform
from vil.data.views import ALL, VIEWS, View, make_views, parse_views

pytestmark = pytest.mark.smoke
PLAIN = dict(mean=[0, 0, 0], std=[1, 1, 1])
WHOLE = eval_transform(16, **PLAIN, crop_pct=0.875)
SQUARE = eval_transform(16, **PLAIN, crop_pct=1.0)


def noise(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def test_numbers_are_prefixes_of_the_longest_list():
    assert parse_views(None) == parse_views(1) == parse_views("1") == ()
    assert parse_views(2) == parse_views("hflip") == (View(), View(mirror=True))
    assert parse_views("10") == VIEWS["crops+hflip"] == ALL
    assert len(set(ALL)) == 10
    with pytest.raises(ValueError, match="a number from 1 to 10, got 11"):
        parse_views(11)


@pytest.mark.parametrize("size", [(1, 1), (7, 8), (40, 30), (16, 200)])
def test_views_of_any_image_have_one_shape(size):
    views = make_views(noise(*size), ALL, WHOLE, SQUARE)
    assert views.shape == (10, 3, 16, 16)
    assert views[0].equal(WHOLE(noise(*size)))
    assert views[1].equal(views[0].flip(-1))
    assert views[6:].equal(views[2:6].flip(-1))


def test_corners_are_the_corners_of_the_whole_image():
    pixels = np.zeros((80, 160, 3), np.uint8)
    for value, (row, column) in enumerate([(0, 0), (0, -1), (-1, 0), (-1, -1)], start=1):
        pixels[row, column] = 60 * value
    same_size = eval_transform(70, **PLAIN, crop_pct=1.0)
    seen = make_views(Image.fromarray(pixels), VIEWS["crops"], same_size, same_size)
    ends = [(0, 0), (0, -1), (-1, 0), (-1, -1)]
    for number, (row, column) in enumerate(ends, start=1):
        assert seen[number][0, row, column] == pytest.approx(60 * number / 255)
