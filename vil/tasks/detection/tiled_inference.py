"""Detection in images of any size: in the full image, or in overlapping tiles.

A detector resizes its input to about 1000 pixels, so small objects in a large image become too
small to detect. With tiles, the scale of objects and the memory of inference do not depend on the
size of the image.

An inner border is a border of a tile that is not a border of the image. A box that touches one may
cover only a part of its object. It is dropped if it lies inside another tile and touches no inner
border there, because the other tile shows more of the object. Non-maximum suppression per class
then removes duplicates. It ranks boxes that touch no inner border first, by score, then the other
boxes, largest first.

As a result, an object whose sides are at least 5 pixels shorter than the overlap is detected once,
with a box that covers all of it, because a box within TOLERANCE of a border touches it. Several
boxes may remain for a larger object, so choose an overlap larger than the largest objects of
interest.
"""

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from vil.data.tiles import make_tiles
from vil.tasks.detection.data.batch import to_unit_range
from vil.tasks.detection.detections import Detections, from_output

TOLERANCE = 2.0  # pixels: a box this close to a border touches it


def detect(model: nn.Module, image: Tensor) -> Detections:
    """Run a detector in eval mode on one image (3, H, W), uint8 or float in 0..1, without tiles."""
    return from_output(model([to_unit_range(image)])[0])


def detect_tiled(
    model: nn.Module, image: Tensor, *, tile: int, overlap: int, nms: float, per_image: int
) -> Detections:
    """Run a detector on overlapping tiles of an image (3, H, W) and merge the detections.

    tile, overlap: side of a tile, and overlap of neighboring tiles, in pixels. nms: IoU threshold
    of non-maximum suppression per class when merging. per_image: maximum number of detections.
    Raises ValueError unless 0 <= overlap < tile.
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


def touches_inner_border(boxes: Tensor, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return whether each box touches an inner border of its tile: (...) bool.

    An inner border is not a border of the image. boxes, tiles (..., 4): x1 y1 x2 y2 in the image,
    broadcast against each other. size: (H, W) of the image.
    """
    height, width = size
    low, high = tiles[..., :2], tiles[..., 2:]
    at_low = (boxes[..., :2] <= low + TOLERANCE) & (low > 0)
    at_high = (boxes[..., 2:] >= high - TOLERANCE) & (high < torch.tensor([width, height]))
    return (at_low | at_high).any(dim=-1)


def in_another_tile(boxes: Tensor, index: int, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return whether each box of tile `index` is completely visible in another tile: (n,) bool.

    Such a box lies inside the other tile, and touches no inner border of it, see
    `touches_inner_border`. boxes (n, 4), tiles (T, 4): x1 y1 x2 y2 in the image. size: (H, W) of
    the image.
    """
    boxes = boxes[:, None]
    inside = (boxes[..., :2] >= tiles[:, :2]) & (boxes[..., 2:] <= tiles[:, 2:])
    inside = inside.all(dim=-1) & ~touches_inner_border(boxes, tiles, size)
    inside[:, index] = False
    return inside.any(dim=1)


def concat(parts: list[Detections]) -> Detections:
    """Concatenate the detections in the tiles of an image. parts: the detections in each tile."""
    masks = None if parts[0].masks is None else [mask for part in parts for mask in part.masks]
    fields = ([getattr(part, name) for part in parts] for name in ("boxes", "labels", "scores"))
    return Detections(*map(torch.cat, fields), masks)


def merge(detections: Detections, cut: Tensor, nms: float, per_image: int) -> Detections:
    """Suppress duplicate detections, and return at most `per_image` of them, sorted by score.

    cut (n,) bool: whether each box touches an inner border of its tile, so that it may cover only a
    part of its object. A cut box is suppressed by boxes that are not cut, whatever their scores,
    and by larger cut boxes. nms: IoU threshold for boxes of the same class.
    """
    # torchvision adds an offset to the boxes of each class: with 4096 pixels and 1000 classes,
    # float32 would not resolve half pixels
    boxes = detections.boxes.double()
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    rank = torch.where(cut, area / (area.sum() + 1), 1 + detections.scores.double())
    kept = batched_nms(boxes, rank, detections.labels, nms).sort().values  # ties: the first
    best = detections.scores[kept].argsort(descending=True, stable=True)[:per_image]
    return detections.select(kept[best])
