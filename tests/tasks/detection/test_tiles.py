"""Tiled inference finds every object of the image once and complete, wherever tiles border."""

import numpy as np
import pytest
import torch

from tests.common.detection.masks import paste
from tests.common.detection.toy_task import ToyDetector, picture
from vil.tasks.detection.detections import Detections
from vil.tasks.detection.tiled_inference import detect, detect_tiled, make_tiles, merge

pytestmark = pytest.mark.smoke


@pytest.fixture
def model():
    return ToyDetector().eval()


def tiled(model, image, **changed):
    options = {"tile": 64, "overlap": 24, "nms": 0.5, "per_image": 100, **changed}
    return detect_tiled(model, image, **options)


def boxes(found):
    return sorted(map(tuple, found.boxes.int().tolist()))


@pytest.mark.parametrize(
    ("size", "tile", "overlap"),
    [((1, 1), 4, 1), ((7, 8), 4, 1), ((64, 64), 64, 0), ((65, 64), 64, 63), ((201, 130), 64, 24)],
)
def test_tiles_cover_every_pixel_and_none_beyond(size, tile, overlap):
    seen, tiles = np.zeros(size, int), make_tiles(size, tile, overlap).tolist()
    for left, top, right, bottom in tiles:
        assert 0 <= left < right <= size[1]
        assert 0 <= top < bottom <= size[0]
        assert (right - left, bottom - top) == (min(tile, size[1]), min(tile, size[0]))
        seen[top:bottom, left:right] += 1
    assert seen.min() >= 1
    assert len(set(map(tuple, tiles))) == len(tiles)
    columns = sorted({(left, right) for left, _, right, _ in tiles})
    assert all(before[1] - after[0] >= overlap for before, after in zip(columns, columns[1:]))


@pytest.mark.parametrize("size", [(150, 203), (64, 300), (50, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_tiled_is_whole(model, size, seed):
    """Objects up to the overlap less what "touches" means, everywhere: on borders, in corners."""
    draw = np.random.default_rng(seed)
    rectangles = []
    for y in range(0, size[0] - 20, 23):
        for x in range(0, size[1] - 20, 23):
            width, height = (int(side) for side in draw.integers(4, 20, 2))
            left, top = x + int(draw.integers(0, 3)), y + int(draw.integers(0, 3))
            rectangles.append((left, top, left + width, top + height))
    image = picture(size, rectangles[:150])
    whole, found = detect(model, image), tiled(model, image)
    assert boxes(found) == boxes(whole) == sorted(rectangles[:150])
    assert sorted(found.scores.tolist(), reverse=True) == found.scores.tolist()
    key = sorted(zip(whole.boxes.tolist(), whole.labels.tolist(), whole.scores.tolist()))
    assert sorted(zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist())) == key


def test_masks_keep_their_place(model):
    image = picture((150, 203), [(30, 30, 50, 44), (58, 90, 77, 109)])
    found = tiled(model, image)
    assert len(found) == 2
    total = sum(paste(mask, (150, 203)) for mask in found.masks)
    assert np.array_equal(total, (image[0] > 0).numpy())
    assert sum(mask.pixels.size for mask in found.masks) < 2000


def test_a_piece_loses_against_a_larger_one(model):
    """Whole in the second tile (40..104), but so close to its border that it may be a piece."""
    image = picture((64, 104), [(41, 5, 83, 30)])
    assert boxes(tiled(model, image)) == [(41, 5, 83, 30)]


@pytest.mark.parametrize("score", [0.95, 0.05])
def test_a_piece_loses_against_a_whole_object(score):
    """Whatever the scores; but not against one of another class."""
    whole, piece = [10.0, 10, 40, 40], [10.0, 10, 30, 40]
    found = Detections(
        torch.tensor([piece, whole, piece]), torch.tensor([1, 1, 2]),
        torch.tensor([score, 0.5, 0.01]),
    )  # fmt: skip
    kept = merge(found, torch.tensor([True, False, True]), nms=0.5, per_image=9)
    assert kept.boxes.tolist() == [whole, piece]
    assert kept.labels.tolist() == [1, 2]


def test_classes_do_not_suppress_each_other_in_large_images():
    """Of 900 classes in 4096 pixels: a box of a pixel for each, and one beside it
    that overlaps it by 27 %, which float32 takes for 39 %."""
    corner = torch.tensor([[4000.0, 4000, 4001, 4001]])
    boxes = torch.cat([corner.repeat(900, 1), corner + 0.35])
    labels = torch.cat([torch.arange(1, 901), torch.tensor([900])])
    scores = torch.cat([torch.full((900,), 0.9), torch.tensor([0.8])])
    kept = merge(Detections(boxes, labels, scores), torch.zeros(901) > 0, 0.3, 2000)
    assert kept.labels.tolist() == [*range(1, 901), 900]


def test_an_object_larger_than_the_overlap_stays_in_pieces(model):
    """No tile contains all of it: the docstring promises no more."""
    image = picture((64, 180), [(10, 10, 170, 40)])
    found = tiled(model, image)
    assert len(found) > 1
    assert boxes(found)[0][0] == 10
    assert max(box[2] for box in boxes(found)) == 170
    assert boxes(tiled(model, image, tile=200, overlap=24)) == [(10, 10, 170, 40)]


def test_only_the_best_stay(model):
    image = picture((64, 180), [(x, 10, x + 10, 20) for x in range(5, 165, 20)])
    assert len(tiled(model, image)) == 8
    best = tiled(model, image, per_image=3)
    assert best.scores.tolist() == pytest.approx([0.9, 0.9, 0.6])


@pytest.mark.parametrize(("tile", "overlap"), [(64, 64), (64, -1), (0, 0)])
def test_an_overlap_that_cannot_be(model, tile, overlap):
    with pytest.raises(ValueError, match=f"less than `tile`: got tile {tile} and"):
        tiled(model, picture((70, 70), []), tile=tile, overlap=overlap)


def test_a_large_image_needs_little_memory(model):
    """4096 x 4096: masks of the objects together are a few thousand pixels."""
    rectangles = [(x, x, x + 40, x + 30) for x in range(500, 4000, 500)]
    image = picture((4096, 4096), rectangles)
    found = detect_tiled(model, image, tile=1024, overlap=128, nms=0.5, per_image=100)
    assert boxes(found) == rectangles
    assert sum(mask.pixels.size for mask in found.masks) < 2 * sum(40 * 30 for _ in rectangles)
