"""Detection in pictures of any size: whole, or in overlapping tiles whose answers are merged.

A detector shrinks what it is given to about a thousand pixels, so that small objects of a large
picture vanish, and its memory grows with the picture. Tiles keep both as in training.

The rule of borders. An object at the inner border of a tile (one that is not the picture's) is cut
there, and its box is that of a piece. A box that touches an inner border is dropped if some other
tile holds all of it away from its own inner borders: that tile sees the whole object, or more of
it. So an object no larger than the overlap is found once, and whole. A box of a piece that no other
tile sees better is kept, and loses against every whole box, and every larger piece, that it
overlaps too much (non-maximum suppression per class). Of an object that is larger than the overlap,
and in no tile as a whole, several pieces may stay: choose an overlap as large as the largest
objects that matter.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from vil.tasks.detection.data.batch import unit_range
from vil.tasks.detection.detections import Detections, from_output

TOUCHES = 2.0  # pixels: detectors place the side of an object that is cut about so well
Tile = tuple[int, int, int, int]  # left, top, right, bottom


def detect(model: nn.Module, image: Tensor) -> Detections:
    """What a detector in evaluation mode finds in an image (3, H, W): uint8, or float in 0..1."""
    return from_output(model([unit_range(image)])[0])


def detect_tiled(
    model: nn.Module,
    image: Tensor,
    *,
    tile: int,
    overlap: int,
    nms: float,
    per_image: int,
    batch: int = 1,
) -> Detections:
    """The same in tiles of `tile` x `tile` pixels that share `overlap` pixels, `batch` at a time.

    The model is in evaluation mode, on the device of the image. Of two boxes of a class whose
    overlap is above `nms`, one goes; the `per_image` best stay. A picture that fits into one tile
    is detected as a whole.
    """
    size = image.shape[-2:]
    tiles = cover(size, tile, overlap)
    found, cut = [], []
    for part in (tiles[start : start + batch] for start in range(0, len(tiles), batch)):
        cuts = [image[:, top:bottom, left:right] for left, top, right, bottom in part]
        # only now: a whole picture in float32 would be fourfold in memory
        for place, output in zip(part, model([unit_range(each) for each in cuts])):
            piece = from_output(output).shifted(*place[:2])
            at_border = touching(piece.boxes, place, size)
            kept = ~(at_border & held_elsewhere(piece.boxes, place, tiles, size))
            found.append(piece.pick(kept))
            cut.append(at_border[kept])
    return merged(joined(found), torch.cat(cut), nms, per_image)


def cover(size: tuple[int, int], tile: int, overlap: int) -> list[Tile]:
    """Tiles that cover a picture (H, W), row by row, none of them beyond it: the last of a row or
    column is moved inwards. A side smaller than a tile has one, as large as the side."""
    if tile < 1 or not 0 <= overlap < tile:
        raise ValueError(f"overlap must be from 0 to below the tile's {tile}, given {overlap}")
    rows, columns = (list(starts(length, tile, overlap)) for length in size)
    height, width = (min(tile, length) for length in size)
    return [(left, top, left + width, top + height) for top in rows for left in columns]


def starts(length: int, tile: int, overlap: int) -> Iterator[int]:
    """Where the tiles of a side begin."""
    last = max(length - tile, 0)
    yield from range(0, last, tile - overlap)
    yield last


def touching(boxes: Tensor, tile: Tile, size: tuple[int, int]) -> Tensor:
    """Which boxes (n, 4) of a tile reach one of its inner borders: (n,) bool."""
    left, top, right, bottom = tile
    height, width = size
    return (
        ((boxes[:, 0] <= left + TOUCHES) & (left > 0))
        | ((boxes[:, 1] <= top + TOUCHES) & (top > 0))
        | ((boxes[:, 2] >= right - TOUCHES) & (right < width))
        | ((boxes[:, 3] >= bottom - TOUCHES) & (bottom < height))
    )


def held_elsewhere(boxes: Tensor, tile: Tile, tiles: list[Tile], size: tuple[int, int]) -> Tensor:
    """Which boxes (n, 4) lie in another tile, away from its inner borders: (n,) bool."""
    held = torch.zeros(len(boxes), dtype=torch.bool)
    for other in tiles:
        if other == tile or not meet(tile, other):
            continue
        left, top, right, bottom = other
        low, high = torch.tensor([left, top]), torch.tensor([right, bottom])
        inside = ((boxes[:, :2] >= low) & (boxes[:, 2:] <= high)).all(dim=1)
        held |= inside & ~touching(boxes, other, size)
    return held


def meet(one: Tile, other: Tile) -> bool:
    """Whether two tiles have pixels in common."""
    across = one[0] < other[2] and other[0] < one[2]
    return across and one[1] < other[3] and other[1] < one[3]


def joined(parts: list[Detections]) -> Detections:
    """The detections of all tiles, one after the other."""
    masks = [part.masks or [] for part in parts]
    return Detections(
        torch.cat([part.boxes for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.scores for part in parts]),
        None if parts[0].masks is None else [mask for some in masks for mask in some],
    )


def merged(found: Detections, cut: Tensor, nms: float, per_image: int) -> Detections:
    """Without those that repeat others, the best first. cut (n,) bool: a piece, which loses against
    whole objects whatever its score, and against larger pieces.

    In float64: torchvision sets the classes far apart in one plane, and float32 has no half pixels
    in 4096 pixels times a thousand classes.
    """
    boxes = found.boxes.double()
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    rank = torch.where(cut, area / (area.sum() + 1), 1 + found.scores.double())
    kept = batched_nms(boxes, rank, found.labels, nms).sort().values  # of equal scores the first
    best = found.scores[kept].argsort(descending=True, stable=True)[:per_image]
    return found.pick(kept[best])
