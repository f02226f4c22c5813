"""Parse and store COCO segmentations, and decode them to bitmaps.

A segmentation is a list of polygons [x, y, x, y, ...] in pixels, or an RLE {size: [h, w], counts}.
The counts are numbers or a string (see vil/data/rle.py). A "piece" is a polygon or an RLE. Its
"extent" is x1 y1 x2 y2, the smallest box around it, and NaN if it is empty.
"""

from array import array
from collections.abc import Iterable
from types import ModuleType

import numpy as np

from vil.data.rle import decompress_runs, runs_to_mask
from vil.utils.extras import Extra, require_extra

# Limits on coordinates and sizes, so that an invalid file cannot exhaust the memory.
MAX_COORDINATE = 100_000.0  # pixels
MAX_PIXELS = 1 << 28
POLYGON = (0, 0)  # in place of the size of an RLE
EMPTY = (None, [], [[]], {}, "")  # segmentations of annotations without a mask
# Unusable forms of polygons that other tools write. Index 0: another form.
FORMS = ("", "that is a flat list", "of points or nested lists")
FLAT, NESTED = 1, 2
Extent = tuple[float, float, float, float]
# (size, runs, extent) of an RLE, (POLYGON, coordinates, extent) of a polygon
Piece = tuple[tuple[int, int], bytes, Extent]


def import_faster_coco_eval() -> ModuleType:
    """Import and return faster_coco_eval. Raises DataError if it is not installed."""
    require_extra(Extra("faster_coco_eval", "detection"), "detection")
    import faster_coco_eval
    import faster_coco_eval.core.mask

    return faster_coco_eval


class Segmentations:
    """The segmentations of M annotations, in a few arrays that forked loader workers share.

    The attribute `usable` (M,) bool is True for a segmentation with at least one valid polygon or
    RLE, see `parse_polygon` and `parse_rle`. `given` (M,) bool is False for those in EMPTY. `forms`
    (M,) int8 is the index in FORMS of an unusable segmentation, 0 for any other. `extents` (M, 4)
    float32 are the smallest boxes around each segmentation.
    """

    def __init__(self, values: Iterable[object]):
        """Parse the segmentations of annotations from JSON. Drops invalid polygons and RLEs."""
        data, ends, sizes, counts = bytearray(), array("q"), array("q"), array("q")
        extents, given, forms = array("d"), array("b"), array("b")
        for value in values:
            pieces = parse_segmentation(value)
            counts.append(len(pieces))
            given.append(bool(pieces) or value not in EMPTY)
            forms.append(0 if pieces else find_form(value))
            for size, content, extent in pieces:
                data += content
                ends.append(len(data))
                sizes.extend(size)
                extents.extend(extent)
        self.data = np.frombuffer(bytes(data), np.uint8)
        self.ends = np.array([0, *ends], np.int64)  # (P + 1,) of P pieces, in bytes
        self.sizes = np.array(sizes, np.int64).reshape(-1, 2)  # (P, 2)
        self.last = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # (M + 1,) in pieces
        self.usable = np.diff(self.last) > 0
        self.given, self.forms = np.array(given, bool), np.array(forms, np.int8)
        self.extents = np.full((len(counts), 4), np.nan, np.float32)
        if len(ends):
            starts, corners = self.last[:-1][self.usable], np.array(extents).reshape(-1, 4)
            self.extents[self.usable, :2] = np.fmin.reduceat(corners[:, :2], starts)
            self.extents[self.usable, 2:] = np.fmax.reduceat(corners[:, 2:], starts)

    def rle_sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the (height, width) of the RLEs of usable segmentations `rows`, (n, 2) int64.

        The size of polygons is (0, 0).
        """
        return self.sizes[self.last[rows]]

    def bitmap(self, index: int, height: int, width: int) -> np.ndarray:
        """Decode the segmentation `index` to a bitmap (height, width) uint8, 1 inside the object.

        An RLE of another size is cropped or padded to (height, width).
        """
        bitmap, polygons = np.zeros((height, width), np.uint8), []
        for piece in range(self.last[index], self.last[index + 1]):
            content = self.data[self.ends[piece] : self.ends[piece + 1]]
            h, w = self.sizes[piece].tolist()
            if (h, w) == POLYGON:
                polygons.append(content.view(np.float64).tolist())
            else:
                mask = runs_to_mask(content.view(np.uint32), h, w)[:height, :width]
                bitmap[: mask.shape[0], : mask.shape[1]] |= mask
        if polygons:
            mask = import_faster_coco_eval().core.mask
            bitmap |= mask.decode(mask.merge(mask.frPyObjects(polygons, height, width)))
        return bitmap


def parse_segmentation(value: object) -> list[Piece]:
    """Parse a segmentation from JSON, and return its valid polygons, or its RLE, as a list.

    An invalid RLE or a value of another type gives an empty list.
    """
    pieces = [parse_rle(value)] if isinstance(value, dict) else []
    if isinstance(value, list):
        pieces = [parse_polygon(polygon) for polygon in value]
    return [piece for piece in pieces if piece is not None]


def find_form(value: object) -> int:
    """Return the index in FORMS of the form of an unusable segmentation from JSON; 0 for others."""
    if not isinstance(value, list) or not value:
        return 0
    first = value[0]
    if isinstance(first, int | float):
        return FLAT
    is_point = isinstance(first, dict) or (isinstance(first, list) and len(first) == 2)
    is_nested = isinstance(first, list) and first and isinstance(first[0], list | dict)
    return NESTED if is_nested or (is_point and len(value) > 2) else 0


def parse_polygon(polygon: object) -> Piece | None:
    """Convert a polygon [x, y, ...] from JSON to (POLYGON, coordinates as float64 bytes, extent).

    Returns None if the polygon is not a list of x and y coordinates, has fewer than three points,
    or has a coordinate beyond MAX_COORDINATE.
    """
    try:
        numbers = array("d", polygon)
    except (TypeError, ValueError, OverflowError):
        return None
    if len(numbers) < 6 or len(numbers) % 2 or not isinstance(polygon, list):
        return None
    if not -MAX_COORDINATE < min(numbers) <= max(numbers) < MAX_COORDINATE:
        return None
    x, y = numbers[::2], numbers[1::2]
    return POLYGON, numbers.tobytes(), (min(x), min(y), max(x), max(y))


def parse_rle(value: dict) -> Piece | None:
    """Convert an RLE from JSON to ((height, width), run lengths as uint32 bytes, extent).

    Returns None if the RLE is invalid or has more than MAX_PIXELS pixels.
    """
    try:
        (height, width), runs = value["size"], value["counts"]
        if isinstance(runs, str):
            runs = decompress_runs(runs.encode("ascii"))
        runs = np.array(runs, np.int64).reshape(-1)
        complete = min(height, width) > 0 and runs.sum() == height * width <= MAX_PIXELS
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not complete or runs.min() < 0 or not isinstance(height * width, int):
        return None
    return (height, width), runs.astype(np.uint32).tobytes(), extent_of_runs(runs, height)


def extent_of_runs(runs: np.ndarray, height: int) -> Extent:
    """Return the extent of the mask with the given run lengths, of columns of `height` pixels."""
    ends = np.cumsum(runs)
    first, last = (ends - runs)[1::2], ends[1::2] - 1  # positions of the ones of each run
    first, last = first[last >= first], last[last >= first]
    if not len(first):
        return (np.nan,) * 4
    left, right = int(first[0] // height), int(last[-1] // height) + 1
    if (first // height != last // height).any():  # a run that goes on in the next column
        return left, 0, right, height
    return left, int((first % height).min()), right, int((last % height).max()) + 1
