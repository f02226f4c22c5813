"""Segmentations as COCO's format has them: checked once, kept in few buffers, drawn as bitmaps.

A segmentation is a list of polygons [x, y, x, y, ...] in pixels, or run lengths {size: [h, w],
counts} as numbers or as a string (vil/data/rle.py). Each polygon, and each RLE, is a piece here.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from vil.data.rle import decompress_runs, runs_to_mask
from vil.utils.errors import DataError

# Drawing takes time and memory in proportion to a polygon's length, and an RLE's to its size: what
# lies or reaches further is a mistake that would fill the memory.
FARTHEST = 100_000.0  # pixels
LARGEST = 1 << 28  # pixels
POLYGON = (0, 0)
Piece = tuple[tuple[int, int], bytes]  # the size of an RLE, or POLYGON; its runs or coordinates


class Segmentations:
    """M segmentations, each any number of pieces, in buffers whose pages forked workers share.

    `usable` (M,) says which have a piece: a polygon of three points or more, or a whole RLE.
    """

    def __init__(self, values: Iterable[object]):
        """The values as they come out of the JSON; no content of theirs is an error."""
        data, ends, sizes, counts = bytearray(), array("q"), array("q"), array("q")
        for value in values:
            found = pieces(value)
            counts.append(len(found))
            for size, content in found:
                data += content
                ends.append(len(data))
                sizes.extend(size)
        self.data = np.frombuffer(bytes(data), np.uint8)
        self.ends = np.array([0, *ends], np.int64)  # (P + 1,) of P pieces, in bytes
        self.sizes = np.array(sizes, np.int64).reshape(-1, 2)  # (P, 2)
        self.last = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # (M + 1,) in pieces
        self.usable = np.diff(self.last) > 0

    def bitmap(self, index: int, height: int, width: int) -> np.ndarray:
        """One of them (height, width) uint8, 0 or 1; an RLE of another size is cut or padded."""
        bitmap, polygons = np.zeros((height, width), np.uint8), []
        for piece in range(self.last[index], self.last[index + 1]):
            content = self.data[self.ends[piece] : self.ends[piece + 1]]
            h, w = self.sizes[piece].tolist()
            if (h, w) == POLYGON:
                polygons.append(content.view(np.float64).tolist())
            else:
                drawn = runs_to_mask(content.view(np.uint32), h, w)[:height, :width]
                bitmap[: drawn.shape[0], : drawn.shape[1]] |= drawn
        return bitmap | polygon_bitmap(polygons, height, width) if polygons else bitmap


def pieces(value: object) -> list[Piece]:
    """What of a segmentation can be drawn, which may be nothing."""
    found = [runs_piece(value)] if isinstance(value, dict) else []
    if isinstance(value, list):
        found = [polygon_piece(polygon) for polygon in value]
    return [piece for piece in found if piece is not None]


def polygon_piece(polygon: object) -> Piece | None:
    """Three points or more, no odd number left over, none out of reach."""
    try:
        numbers = array("d", polygon)
    except (TypeError, ValueError, OverflowError):
        return None
    if len(numbers) < 6 or len(numbers) % 2 or not isinstance(polygon, list):
        return None
    if not -FARTHEST < min(numbers) <= max(numbers) < FARTHEST:
        return None
    return POLYGON, numbers.tobytes()


def runs_piece(value: dict) -> Piece | None:
    """Runs that add up to the size that it names."""
    try:
        height, width = value["size"]
        counts = value["counts"]
        runs = (
            decompress_runs(counts.encode("ascii"))
            if isinstance(counts, str)
            else np.array(counts, np.int64).reshape(-1)
        )
        whole = min(height, width) > 0 and runs.sum() == height * width <= LARGEST
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not whole or runs.min() < 0 or not isinstance(height * width, int):
        return None
    return (height, width), runs.astype(np.uint32).tobytes()


def polygon_bitmap(polygons: list[list[float]], height: int, width: int) -> np.ndarray:
    """The pixels (height, width) uint8 inside of any of them, as COCO's own tools draw them."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise DataError(
            "polygons are drawn by faster-coco-eval: pip install 'vil[detection]'"
        ) from error
    return mask.decode(mask.merge(mask.frPyObjects(polygons, height, width)))
