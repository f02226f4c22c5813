"""Pictures of windows and of attention show the numbers they are given."""

import numpy as np
from matplotlib.image import imread

from vil.report.attention_maps import Row, draw_attention
from vil.report.pattern import QUERY, SEEN, TWICE, UNSEEN, draw_patterns, seen_from


def test_what_is_seen_once_twice_and_not():
    picture = seen_from([(0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (1, 0)], (2, 3), (1, 0))
    assert picture.tolist() == [[SEEN, SEEN, UNSEEN], [QUERY, UNSEEN, TWICE]]


def test_panels_of_any_number_and_shape_are_drawn(tmp_path):
    for count, grid in ((1, (1, 1)), (5, (3, 40)), (2, (90, 7))):
        panels = [(f"panel {n}", seen_from([(0, 0)], grid, (0, 0)), 4) for n in range(count)]
        draw_patterns(panels, tmp_path / "pattern.png")
        pixels = imread(tmp_path / "pattern.png")
        assert max(pixels.shape) < 2000
        assert (
            (pixels[..., :3] == np.array([8, 48, 107], np.float32) / 255).all(-1).any()
        )  # a query


def drawn(tmp_path, *rows, image=None):
    image = np.ones((12, 12, 3)) if image is None else image
    draw_attention(image, list(rows), "a $title^{ and \udcff \n more", tmp_path / "seen.png")
    return imread(tmp_path / "seen.png")


def test_maps_differ_with_their_weights(tmp_path):
    """Titles that TeX and UTF-8 refuse are drawn; a row without a weight (padding) too."""
    weights = np.zeros((2, 1 + 9))
    row = Row("stage 1", weights, 1, (3, 3), 4, (4, 0, 4))
    nothing = drawn(tmp_path, row)
    weights[0, 1] = 1.0
    assert (drawn(tmp_path, row) != nothing).any()
    wider = row._replace(weights=np.full((5, 4), 0.25), cells=(1, 3))
    assert drawn(tmp_path, row, wider._replace(square=None)).shape[1] > nothing.shape[1]
