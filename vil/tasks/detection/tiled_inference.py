"""Detection in images of any size: in the full image, or in overlapping tiles.

A detector resizes its input to about a thousand pixels, so that small objects of a large image
vanish, and its memory grows with the image. Tiles keep the scale and memory of training.

An object at an inner border of a tile (one that is not the image's) is cut, and its box is that of
a piece. A box that touches an inner border is dropped if another tile contains it away from its own
inner borders: that tile sees more of the object. So an object no larger than the overlap is
detected once, uncut. Other pieces are kept, and lose against every uncut box and every larger piece
that they overlap too much (non-maximum suppression per class). Several pieces may remain of an
object larger than the overlap: choose an overlap as large as the largest objects that matter.
"""

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from vil.tasks.detection.data.batch import to_unit_range
from vil.tasks.detection.detections import Detections, from_output

TOLERANCE = 2.0  # pixels: the accuracy of a detector on the side of an object that is cut


def detect(model: nn.Module, image: Tensor) -> Detections:
    """Run a detector in eval mode on an image (3, H, W): uint8, or float in 0..1."""
    return from_output(model([to_unit_range(image)])[0])


def detect_tiled(
    model: nn.Module, image: Tensor, *, tile: int, overlap: int, nms: float, per_image: int
) -> Detections:
    """Run a detector on tiles of `tile` x `tile` pixels that share `overlap` pixels.

    nms: largest IoU of two boxes of a class. per_image: most detections returned.
    """
    size = image.shape[-2:]
    tiles = make_tiles(size, tile, overlap)
    parts, cut = [], []
    for i, (left, top, right, bottom) in enumerate(tiles.tolist()):
        part = detect(model, image[:, top:bottom, left:right]).shift(left, top)
        is_cut = touches_inner_border(part.boxes, tiles[i], size)
        kept = ~(is_cut & in_another_tile(part.boxes, i, tiles, size))
        parts.append(part.select(kept))
        cut.append(is_cut[kept])
    return merge(concat(parts), torch.cat(cut), nms, per_image)


def make_tiles(size: tuple[int, int], tile: int, overlap: int) -> Tensor:
    """Cover an image (H, W) with tiles x1 y1 x2 y2, (T, 4) int64, row by row.

    The last tile of a row or column is moved inwards. A side smaller than a tile has one tile of
    that size.
    """
    if tile < 1 or not 0 <= overlap < tile:
        raise ValueError(f"overlap must be from 0 to below the tile's {tile}, given {overlap}")
    last = [max(side - tile, 0) for side in size]
    tops, lefts = ([*range(0, end, tile - overlap), end] for end in last)
    height, width = (min(tile, side) for side in size)
    return torch.tensor([(x, y, x + width, y + height) for y in tops for x in lefts])


def touches_inner_border(boxes: Tensor, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which boxes (..., 4) reach an inner border of their tiles (..., 4): (...) bool."""
    height, width = size
    low, high = tiles[..., :2], tiles[..., 2:]
    at_low = (boxes[..., :2] <= low + TOLERANCE) & (low > 0)
    at_high = (boxes[..., 2:] >= high - TOLERANCE) & (high < torch.tensor([width, height]))
    return (at_low | at_high).any(dim=-1)


def in_another_tile(boxes: Tensor, index: int, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which boxes (n, 4) of a tile lie in another, off its inner borders: (n,) bool."""
    boxes = boxes[:, None]
    inside = (boxes[..., :2] >= tiles[:, :2]) & (boxes[..., 2:] <= tiles[:, 2:])
    inside = inside.all(dim=-1) & ~touches_inner_border(boxes, tiles, size)
    inside[:, index] = False
    return inside.any(dim=1)


def concat(parts: list[Detections]) -> Detections:
    """Concatenate the detections of all tiles."""
    masks = None if parts[0].masks is None else [mask for part in parts for mask in part.masks]
    fields = ([getattr(part, name) for part in parts] for name in ("boxes", "labels", "scores"))
    return Detections(*map(torch.cat, fields), masks)


def merge(detections: Detections, cut: Tensor, nms: float, per_image: int) -> Detections:
    """Suppress repeated detections and sort by score.

    cut (n,) bool: pieces, which lose against uncut objects of any score, and larger pieces. In
    float64: torchvision offsets the boxes of each class, and float32 cannot resolve half pixels at
    4096 pixels times a thousand classes.
    """
    boxes = detections.boxes.double()
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    rank = torch.where(cut, area / (area.sum() + 1), 1 + detections.scores.double())
    kept = batched_nms(boxes, rank, detections.labels, nms).sort().values  # ties: the first
    best = detections.scores[kept].argsort(descending=True, stable=True)[:per_image]
    return detections.select(kept[best])
