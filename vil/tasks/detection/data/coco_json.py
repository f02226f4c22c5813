"""Read annotations in COCO's format into arrays, and find the unusable ones.

The format is defined at https://cocodataset.org/#format-data. Images are not opened, because their
sizes are in the annotation file. Shapes: N images, K categories, M annotations.
"""

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vil.tasks.detection.data.masks import Segmentations
from vil.utils.errors import DataError
from vil.utils.safe_files import regular_file

Array = np.ndarray

FORMAT = (
    "expected COCO's format: images [{id, file_name, width, height}], categories [{id, name}], "
    "annotations [{id, image_id, category_id, bbox [x, y, width, height], iscrowd, segmentation}]"
)
REQUIRED = {
    "images": {"id": int | str, "file_name": str, "width": int, "height": int},
    "categories": {"id": int, "name": str},
    "annotations": {},
}
MIN_SIDE = 1.0  # minimum of each side of a training box in pixels, after clipping to the image
# Reasons to drop an annotation. The first one that applies is used. Index 0: usable.
REASONS = (
    "",
    "an image that the file does not have",
    "a category that the file does not have",
    "no box of four finite numbers",
    "a box without area",
    "a box outside of its image",
    f"a box with a side under {MIN_SIDE:g} px inside of its image",
    "no usable segmentation",
)


class Fault(NamedTuple):
    """An invalid annotation or image, with the reason why it is invalid."""

    about: str  # "annotation <id>" or "image"
    image: str  # file name, "" for an unknown image
    reason: str


@dataclass(frozen=True, eq=False)
class AnnotationSource:
    """Annotations in COCO's format: a file, or a part of its images, or a text in memory.

    path: the file; with `text`, the file or folder it was converted from, for messages. text: JSON.
    by_name: whether to sort the images by file name, so that they have the same order in each
    layout. image_ids: ids of the images to use; None for all. notes: lines about the conversion.
    """

    path: Path
    text: str | None = None
    by_name: bool = False
    image_ids: frozenset[int] | None = None
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return str(self.path)


def to_source(annotations: str | Path | AnnotationSource) -> AnnotationSource:
    """Return annotations that may be given by the path of their file as an `AnnotationSource`."""
    is_source = isinstance(annotations, AnnotationSource)
    return annotations if is_source else AnnotationSource(Path(annotations))


@dataclass(frozen=True, eq=False)
class Annotations:
    """Annotations in COCO's format as arrays: N images, K categories, and M annotations.

    The arrays include crowd annotations, for which `crowd` is True, and unusable annotations, for
    which `reasons` is not 0.
    """

    path: Path  # for messages
    image_ids: Array  # (N,) int64
    annotation_ids: list  # (M,) of any JSON values
    names: Array  # (N,) bytes: file names, in one buffer that forked workers share
    sizes: Array  # (N, 2) int64: width and height
    category_ids: list[int]  # (K,) ascending
    classes: list[str]  # (K,)
    images: Array  # (M,) int64: index of the image, 0..N - 1, or -1 if unknown
    labels: Array  # (M,) int64: label of the category, 1..K, or 0 if unknown
    boxes: Array  # (M, 4) float32: x1 y1 x2 y2, not clipped, NaN if invalid
    areas: Array  # (M,) float64: from the file, or else the area of the box
    crowd: Array  # (M,) bool
    segmentations: Segmentations | None  # None if read without masks
    reasons: Array  # (M,) int64 into REASONS
    dropped: list[Fault]  # annotations that are not usable, in the file's order

    def describe(self, row: int) -> tuple[str, str]:
        """Return ("annotation <id>", file name of its image) of the annotation `row`."""
        at = self.images[row]
        name = os.fsdecode(self.names[at]) if at >= 0 else ""
        return f"annotation {self.annotation_ids[row]}", name

    def count_empty(self, usable: Array) -> int:
        """Count the images without a usable annotation. usable (M,): whether each annotation is."""
        return len(self.names) - len(np.unique(self.images[usable]))

    def count_dropped(self) -> dict[str, int]:
        """Count the dropped annotations and return {reason: count}."""
        counts = np.bincount(self.reasons, minlength=len(REASONS)).tolist()
        return {reason: count for reason, count in zip(REASONS, counts) if reason and count}


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable Python's cyclic garbage collector. Use as a context manager or decorator.

    Reading COCO's annotation file takes 25 s with the collector, and 5 s without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@pause_gc()
def read_annotations(
    annotations: str | Path | AnnotationSource, *, masks: bool = False
) -> Annotations:
    """Read annotations in COCO's format, and find the unusable ones.

    annotations: a file, or an `AnnotationSource`. masks: also read masks. An annotation without a
    valid segmentation is then unusable. Raises DataError if the file is missing, truncated or not
    in COCO's format, has no images, or repeats an id.
    """
    source = to_source(annotations)
    path, tables = source.path, read_tables(source)
    images, categories, rows = (tables[key] for key in REQUIRED)
    if not images:
        raise DataError(f"{path} has no images; {FORMAT}")
    image_ids = unique_ids(path, "images", images)
    order = np.argsort(unique_ids(path, "categories", categories), kind="stable").tolist()
    categories = [categories[i] for i in order]
    index = {number: i for i, number in enumerate(image_ids.tolist())}
    label = {category["id"]: i for i, category in enumerate(categories, start=1)}
    image_of = [find(index, row.get("image_id"), -1) for row in rows]
    label_of = [find(label, row.get("category_id"), 0) for row in rows]
    columns = dict(
        sizes=np.array([[row["width"], row["height"]] for row in images], np.int64),
        images=np.array(image_of, np.int64),
        labels=np.array(label_of, np.int64),
        boxes=parse_boxes([row.get("bbox") for row in rows]),
        segmentations=Segmentations(row.get("segmentation") for row in rows) if masks else None,
    )
    reasons, dropped = find_reasons(**columns), []
    table = Annotations(
        path=path,
        image_ids=image_ids,
        annotation_ids=[row.get("id") for row in rows],
        names=np.array([os.fsencode(row["file_name"]) for row in images]),
        category_ids=[category["id"] for category in categories],
        classes=[category["name"] for category in categories],
        areas=parse_areas([row.get("area") for row in rows], columns["boxes"]),
        crowd=np.array([row.get("iscrowd") == 1 for row in rows], bool),
        reasons=reasons,
        dropped=dropped,
        **columns,
    )
    for i in np.flatnonzero(reasons).tolist():
        dropped.append(Fault(*table.describe(i), REASONS[reasons[i]]))
    return table


def read_tables(
    annotations: str | Path | AnnotationSource,
) -> dict[str, list[dict[str, Any]]]:
    """Return the content of annotations: {"images": [...], "annotations": [...], ...}.

    annotations: a JSON file, or an `AnnotationSource`. Image ids that are strings are replaced, see
    `number_images`, and names of categories lose extra spaces. Raises DataError if the file cannot
    be read, or if a list or field in REQUIRED is missing or invalid.
    """
    source = to_source(annotations)
    path = source.path
    try:
        # NaN and Infinity are not valid JSON, but Python's json writes them. Read them as None.
        text = source.text
        if text is None:
            text = regular_file(path).read_text("utf-8-sig")
        content = json.loads(text, parse_constant=lambda name: None)
    except FileNotFoundError as error:
        raise DataError(f"there is no annotation file {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON, or is truncated: {error}") from error
    for key, fields in REQUIRED.items():
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise DataError(f"{path} has no list {key!r}; {FORMAT}")
        for i, row in enumerate(rows):
            if fault := find_fault(row, fields):
                raise DataError(f"{path}: {key}[{i}] {fault}; {FORMAT}")
    number_images(content)
    for category in content["categories"]:
        category["name"] = " ".join(category["name"].split())
    if source.by_name:
        content["images"].sort(key=lambda row: row["file_name"])
    if source.image_ids is not None:
        used = dict.fromkeys(source.image_ids, True)
        for key, name in (("images", "id"), ("annotations", "image_id")):
            content[key] = [row for row in content[key] if find(used, row.get(name), False)]
    return content


def number_images(tables: dict[str, list[dict[str, Any]]]) -> None:
    """If an image id is a string, replace the image ids by the numbers from 1, in place. Each image
    keeps the id of the file as `given_id`. tables: content of an annotation file."""
    images = tables["images"]
    if not any(isinstance(row["id"], str) for row in images):
        return
    numbers = {row["id"]: number for number, row in enumerate(images, start=1)}
    for row in tables["annotations"]:
        row["image_id"] = find(numbers, row.get("image_id"), None)
    for row in images:
        row["given_id"], row["id"] = row["id"], numbers[row["id"]]


def given_ids(annotations: str | Path | AnnotationSource) -> dict[int, int | str]:
    """Return {image id: id in the annotation file}, which differ if the file has strings."""
    images = read_tables(annotations)["images"]
    return {row["id"]: row.get("given_id", row["id"]) for row in images}


def find_fault(row: object, fields: dict[str, Any]) -> str | None:
    """Return a description of the first invalid field of a JSON object; None if all are valid.

    row: an image, category or annotation of an annotation file. fields: {required field: type}.
    """
    if not isinstance(row, dict):
        return f"is not an object, but {row!r:.40}"
    for key, field_type in fields.items():
        value = row.get(key)
        if not isinstance(value, field_type) or isinstance(value, bool):
            type_name = getattr(field_type, "__name__", field_type)
            wrong = f"has {key} {value!r:.40}, which is not of type {type_name}"
            return wrong if key in row else f"has no {key!r}"
        if key in ("width", "height") and not 0 < value < 1 << 31:
            return f"has {key} {value}, which is not a size in pixels"
        if key == "id" and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return "has an id of more than 64 bits"
        if key == "file_name" and "\0" in value:
            return f"has a file_name that no file can have: {value!a:.40}"
        try:
            os.fsencode(value) if key == "file_name" else str(value).encode()
        except UnicodeEncodeError:
            return f"has a {key} that is not text: {value!a:.40}"
    return None


def unique_ids(path: Path, key: str, rows: list[dict[str, Any]]) -> Array:
    """Return the ids of the images or categories of an annotation file, (n,) int64.

    rows: the list of images or categories. key: "images" or "categories". path: the file. `path`
    and `key` are used only in the error message. Raises DataError for a duplicate id.
    """
    ids = np.array([row["id"] for row in rows], np.int64)
    values, counts = np.unique(ids, return_counts=True)
    if (repeated := values[counts > 1]).size:
        raise DataError(f"{path}: two of its {key} have the id {repeated[0]}; ids must be unique")
    return ids


def find(mapping: Mapping[Any, Any], key: object, default: Any) -> Any:
    """Return mapping.get(key, default), or `default` if the key, a JSON value, is not hashable."""
    with suppress(TypeError):
        return mapping.get(key, default)
    return default


def parse_boxes(boxes: list) -> Array:
    """Convert the boxes of M annotations from JSON to x1 y1 x2 y2, (M, 4) float32.

    boxes: list of [x, y, width, height]. An element that is not four numbers becomes four NaNs.
    """
    with np.errstate(all="ignore"):
        try:
            parsed = np.array(boxes, np.float64).reshape(len(boxes), 4)
        except (TypeError, ValueError, OverflowError):
            parsed = np.array([parse_box(box) for box in boxes])
        parsed[:, 2:] += parsed[:, :2]
        return parsed.astype(np.float32)


def parse_box(box: object) -> list[float]:
    """Return a JSON value as a list of four floats, or four NaNs if it is not such a list."""
    try:
        return np.array(box, np.float64).reshape(4).tolist()
    except (TypeError, ValueError, OverflowError):
        return [np.nan] * 4


def parse_areas(values: list, boxes: Array) -> Array:
    """Return the areas of M annotations, (M,) float64.

    values: areas from the file. If one is not a finite number, the area of the annotation's box is
    used instead. boxes (M, 4): x1 y1 x2 y2.
    """
    with np.errstate(all="ignore"):
        box_areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    valid = (isinstance(value, (int, float)) and abs(value) < 1e300 for value in values)
    return np.array([v if ok else area for v, ok, area in zip(values, valid, box_areas)], float)


def find_reasons(
    sizes: Array, images: Array, labels: Array, boxes: Array, segmentations: Segmentations | None
) -> Array:
    """Return (M,) int64 for M annotations: 0 if usable, else the index of the reason in REASONS.

    The arguments are the fields of `Annotations` with the same names. Some reasons concern the part
    of a box inside the image. It is computed in float32, to agree with `transforms.clip_boxes`.
    """
    # an annotation with image -1 is dropped, so the limits used for it do not matter
    limits = np.tile(sizes[images], 2).astype(np.float32)
    with np.errstate(all="ignore"):
        sides = boxes[:, 2:] - boxes[:, :2]
        clipped = np.clip(boxes, 0, limits)
        visible = clipped[:, 2:] - clipped[:, :2]
    usable = np.ones(len(boxes), bool) if segmentations is None else segmentations.usable
    faults = [
        images < 0,
        labels == 0,
        ~np.isfinite(boxes).all(axis=1),
        (sides <= 0).any(axis=1),
        (visible <= 0).any(axis=1),
        (visible < MIN_SIDE).any(axis=1),
        ~usable,
    ]
    return np.select(faults, range(1, len(REASONS)), default=0).astype(np.int64)
