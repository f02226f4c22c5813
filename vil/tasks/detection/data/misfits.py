"""Check that annotations fit their images: sizes, boxes, masks, and forms of segmentations.

Training, `--dry-run`, `vil data check` and `vil detect check` report the misfits that are found
here. A few misfits are reported. If more than MAX_SHARE of a training set do not fit, it cannot be
used for training, because its coordinates probably mean something else. Copies of annotations and
images that are listed twice are only reported.

Shapes: N images, M annotations.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vil.tasks.detection.data.coco_json import Annotations
from vil.tasks.detection.data.masks import FORMS
from vil.utils.console import printable

Array = np.ndarray

MAX_SHARE = 0.5  # of the annotations or images of a training set, for each kind of misfit
SLACK = 1.0  # pixels by which a box may reach beyond its image, or a mask beyond its box
MIN_INSIDE = 0.5  # minimum fraction of a mask's extent that is inside of its box
EXPLAINED = 0.95  # a reading explains misfits if at least this fraction of them fits with it

BOX_BEYOND = f"a box that reaches more than {SLACK:g} px beyond the image"
BOX_FRACTIONS = "a box within 0..1, but boxes are in pixels, not in fractions of the image's size"
RLE_SIZE = "an RLE of another size than the image"
MASK_OUTSIDE = "a mask that lies mostly outside of its box"
IMAGE_SIZE = "another size than the file says"
SAME_FILE = "the file name of another image"
COPY = "the image, category and box of another annotation"

# {what the four numbers of a box may be instead of x y width height: columns -> x1 y1 x2 y2}
BOX_READINGS: dict[str, Callable[[Array, Array, Array, Array], tuple[Array, ...]]] = {
    "x1 y1 x2 y2": lambda a, b, c, d: (a, b, c, d),
    "the center, width and height": lambda a, b, c, d: (a - c / 2, b - d / 2, a + c / 2, b + d / 2),
    "y x height width": lambda a, b, c, d: (b, a, b + d, a + c),
    "y1 x1 y2 x2": lambda a, b, c, d: (b, a, d, c),
}


@dataclass(frozen=True)
class Misfit:
    """One way in which annotations do not fit their images.

    reason: what the annotations or images have. rows: their indices. total: number of annotations
    or images that were checked. example: one of them. hint: what the cause may be. about: noun for
    what is counted. of_masks: whether it matters only to detectors with masks. limit: share above
    which the set cannot be used for training.
    """

    reason: str
    rows: Array = field(repr=False)
    total: int
    example: str
    hint: str = ""
    about: str = "annotations"
    of_masks: bool = False
    limit: float = MAX_SHARE

    @property
    def is_common(self) -> bool:
        """Whether so many do not fit that the set cannot be used for training."""
        return len(self.rows) > self.limit * self.total

    def __str__(self) -> str:
        hint = f": {self.hint}" if self.hint else ""
        count = f"{len(self.rows)} of {self.total} {self.about}"
        return f"{count} have {self.reason}, such as {printable(self.example)}{hint}"


def find_misfits(table: Annotations) -> list[Misfit]:
    """Find the annotations that do not fit the image sizes in their file. Images are not opened.

    Segmentations are checked only if the table was read with masks.
    """
    found = [*check_boxes(table), *check_copies(table)]
    if table.segmentations is not None:
        found += [*check_forms(table), *check_masks(table)]
    return [misfit for misfit in found if len(misfit.rows)]


def check_boxes(table: Annotations) -> list[Misfit]:
    """Find the boxes that reach beyond their image, and those in fractions of its size."""
    with np.errstate(invalid="ignore"):
        valid = (table.images >= 0) & (table.boxes[:, 2:] > table.boxes[:, :2]).all(axis=1)
    rows = np.flatnonzero(valid & np.isfinite(table.boxes).all(axis=1))
    boxes, limits = table.boxes[rows], table.sizes[table.images[rows]]
    given = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    small = (given >= 0).all(axis=1) & (given <= 1).all(axis=1)
    fractions = small & (given != given.round()).any(axis=1)
    beyond = ~is_inside(boxes, limits)
    is_frequent = beyond.sum() > (1 - EXPLAINED) * len(rows)
    hint = explain_boxes(given, limits) if is_frequent else ""
    return [
        misfit_of(table, BOX_BEYOND, rows[beyond], len(rows), hint),
        misfit_of(table, BOX_FRACTIONS, rows[fractions], len(rows)),
    ]


def explain_boxes(given: Array, limits: Array) -> str:
    """Return what boxes given as four numbers (n, 4) may be, "" if no reading explains them.

    limits (n, 2): width and height of the images.
    """
    for reading, convert in BOX_READINGS.items():
        boxes = np.stack(convert(*given.T), axis=1)
        if is_inside(boxes, limits).mean() >= EXPLAINED:
            return f"are boxes {reading} instead of x y width height?"
    return ""


def is_inside(boxes: Array, limits: Array) -> Array:
    """Return (n,) bool: whether boxes (n, 4), x1 y1 x2 y2, have an area and are inside of images.

    limits (n, 2): width and height of the images. A box may reach SLACK pixels beyond its image.
    """
    first, last = boxes[:, :2], boxes[:, 2:]
    inside = (first >= -SLACK) & (last <= limits + SLACK) & (last > first)
    return inside.all(axis=1)


def check_copies(table: Annotations) -> list[Misfit]:
    """Find the images that are listed more than once, and the copies of annotations."""
    _, first = np.unique(table.names, return_index=True)
    images = np.setdiff1d(np.arange(len(table.names)), first)
    name = os.fsdecode(table.names[images[0]]) if len(images) else ""
    hint = "list each image once, with all of its annotations"
    with np.errstate(invalid="ignore"):
        has_area = (table.boxes[:, 2:] > table.boxes[:, :2]).all(axis=1)
    rows = np.flatnonzero(has_area & (table.images >= 0) & (table.labels > 0))
    keys = np.column_stack([table.images[rows], table.labels[rows], table.boxes[rows]])
    order = np.lexsort(keys.T)  # stable, and three times as fast as np.unique for COCO's file
    is_copy = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    copies = np.sort(rows[order[1:][is_copy]])
    return [
        Misfit(SAME_FILE, images, len(table.names), name, hint, about="images", limit=1),
        replace(misfit_of(table, COPY, copies, len(rows), "remove the copies"), limit=1),
    ]


def check_forms(table: Annotations) -> list[Misfit]:
    """Find the unusable segmentations in a form that other tools write."""
    forms, total = table.segmentations.forms, int(table.segmentations.given.sum())
    hint = "polygons are [[x, y, x, y, ...], ...]"
    return [
        misfit_of(table, f"a segmentation {form}", np.flatnonzero(forms == i), total, hint, True)
        for i, form in enumerate(FORMS)
        if form
    ]


def check_masks(table: Annotations) -> list[Misfit]:
    """Find the RLEs of another size than their image, and the masks that are not in their box."""
    masks = table.segmentations
    rows = np.flatnonzero((table.reasons == 0) & masks.usable)
    sizes, limits = masks.rle_sizes(rows), table.sizes[table.images[rows]]
    is_rle = sizes.any(axis=1)
    resized = is_rle & (sizes != limits[:, ::-1]).any(axis=1)
    hint = "RLEs are [height, width] of the image"
    if resized.any() and (sizes == limits)[resized].all(axis=1).mean() >= EXPLAINED:
        hint = "are their sizes [width, height] instead of [height, width]?"
    extents, boxes = masks.extents[rows], table.boxes[rows]
    outside = ~fits_box(extents, boxes) & ~resized
    cause = explain_masks(extents[outside], boxes[outside], is_rle[outside])
    return [
        misfit_of(table, RLE_SIZE, rows[resized], int(is_rle.sum()), hint, True),
        misfit_of(table, MASK_OUTSIDE, rows[outside], len(rows), cause, True),
    ]


def explain_masks(extents: Array, boxes: Array, is_rle: Array) -> str:
    """Return the probable cause of masks outside of their boxes, "" if there is none.

    The arguments are those of n masks: extents and boxes (n, 4), is_rle (n,).
    """
    if not len(extents):
        return ""
    if is_rle.mean() >= EXPLAINED:
        return "are their counts row by row? COCO's go column by column"
    with np.errstate(invalid="ignore"):
        fractions = (extents <= 1).all(axis=1) & (extents >= 0).all(axis=1)
    if fractions.mean() >= EXPLAINED:
        return "are polygons in fractions of the image's size? COCO's are in pixels"
    if fits_box(extents[:, [1, 0, 3, 2]], boxes).mean() >= EXPLAINED:
        return "are polygons y, x, ... instead of x, y, ...?"
    return ""


def fits_box(extents: Array, boxes: Array) -> Array:
    """Return (n,) bool: whether enough of the extent of each mask is inside of its box.

    extents, boxes (n, 4): x1 y1 x2 y2. The extent of an empty mask is NaN, and does not fit.
    """
    low = np.maximum(extents[:, :2] - SLACK / 2, boxes[:, :2] - SLACK)
    high = np.minimum(extents[:, 2:] + SLACK / 2, boxes[:, 2:] + SLACK)
    with np.errstate(invalid="ignore"):
        inside = np.maximum(high - low, 0).prod(axis=1)
        return inside >= MIN_INSIDE * (extents[:, 2:] - extents[:, :2] + SLACK).prod(axis=1)


def misfit_of(
    table: Annotations,
    reason: str,
    rows: Array,
    total: int,
    hint: str = "",
    of_masks: bool = False,
) -> Misfit:
    """Return the misfit of the annotations `rows` of a table."""
    example = "{} of {}".format(*table.describe(int(rows[0]))) if len(rows) else ""
    return Misfit(reason, rows, total, example, hint, of_masks=of_masks)


def compare_sizes(names: Sequence[str], expected: Array, actual: Array) -> list[Misfit]:
    """Find the images whose size differs from that in the annotation file.

    names: file names of N images. expected, actual (N, 2): width and height in the file, and of the
    image after it is turned upright by its EXIF orientation.
    """
    rows = np.flatnonzero((expected != actual).any(axis=1))
    if not len(rows):
        return []
    (w, h), (width, height) = expected[rows].T, actual[rows].T
    turned = (w == height) & (h == width)
    resized = abs(w * height - h * width) <= w + h  # sides are rounded
    hint = ""
    if turned.mean() >= EXPLAINED:
        hint = "were they turned (by EXIF) after they were annotated?"
    elif resized.mean() >= EXPLAINED:
        hint = "were they resized after they were annotated?"
    name, (w, h), (width, height) = names[rows[0]], expected[rows[0]], actual[rows[0]]
    example = f"{name} ({w} x {h} px in the file, {width} x {height} px in the image)"
    return [Misfit(IMAGE_SIZE, rows, len(names), example, hint, about="images")]
