"""A file in COCO's format as columns, and what of it cannot be used.

Pictures are not opened here: sizes are those that the file gives. Letters: N images,
K categories, M annotations.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vil.tasks.detection.data.coco_tables import FORMAT, NEEDED, no_collection, tables
from vil.tasks.detection.data.masks import Segmentations
from vil.utils.errors import DataError

# The shortest side, in pixels, of a box that is trained on, after the picture's border has cut it.
MIN_SIDE = 1.0
# Why an annotation is dropped. The first reason that holds counts; 0 is a usable one.
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


class Dropped(NamedTuple):
    """An annotation that is not used."""

    annotation: object  # its id, as the file has it
    image: str  # its image's file name, "" when the file has no such image
    reason: str


@dataclass(frozen=True, eq=False)
class Annotations:
    """The columns of a file. A crowd is an annotation like others here; `label` 0 is unknown."""

    path: Path
    image_ids: np.ndarray  # (N,) int64
    names: np.ndarray  # (N,) bytes: file names, in one buffer that forked workers share
    sizes: np.ndarray  # (N, 2) int64: width and height
    category_ids: list[int]  # (K,) ascending
    classes: list[str]  # (K,)
    ids: np.ndarray  # (M,) int64, or objects where the file has others
    images: np.ndarray  # (M,) int64: 0..N - 1, or -1
    labels: np.ndarray  # (M,) int64: 1..K, or 0
    boxes: np.ndarray  # (M, 4) float32: x1 y1 x2 y2, as they are, also where they are NaN
    areas: np.ndarray  # (M,) float64: as the file has them, else of the box
    crowd: np.ndarray  # (M,) bool
    segmentations: Segmentations | None  # None: not asked for
    reasons: np.ndarray  # (M,) int64 into REASONS

    def name(self, image: int) -> str:
        """An image's file name, "" for -1."""
        return os.fsdecode(self.names[image]) if image >= 0 else ""

    def dropped(self) -> Iterator[Dropped]:
        """Those that cannot be used, in the file's order."""
        for at in np.flatnonzero(self.reasons).tolist():
            yield Dropped(self.ids.item(at), self.name(self.images[at]), REASONS[self.reasons[at]])

    def counts(self) -> dict[str, int]:
        """{reason: how many}, of the reasons that occur."""
        found = np.bincount(self.reasons, minlength=len(REASONS)).tolist()
        return {reason: count for reason, count in zip(REASONS, found) if reason and count}


@no_collection()
def read_annotations(path: str | Path, *, masks: bool = False) -> Annotations:
    """The columns. With masks an annotation without a usable segmentation is dropped too.

    DataError for a file that is missing, cut, no JSON or not of the format, has no image, or gives
    an id twice.
    """
    path = Path(path)
    table = tables(path)
    images, categories, rows = (table[key] for key in NEEDED)
    if not images:
        raise DataError(f"{path} has no images; {FORMAT}")
    image_ids = unique_ids(path, "images", images)
    category_ids = unique_ids(path, "categories", categories)
    order = np.argsort(category_ids, kind="stable").tolist()
    index = {number: at for at, number in enumerate(image_ids.tolist())}
    label = {categories[at]["id"]: place + 1 for place, at in enumerate(order)}
    places = [position(index, row.get("image_id"), -1) for row in rows]
    labels = [position(label, row.get("category_id"), 0) for row in rows]
    boxes = as_corners([row.get("bbox") for row in rows])
    sizes = np.array([[row["width"], row["height"]] for row in images], np.int64)
    columns = dict(
        sizes=sizes,
        images=np.array(places, np.int64),
        labels=np.array(labels, np.int64),
        boxes=boxes,
        segmentations=Segmentations(row.get("segmentation") for row in rows) if masks else None,
    )
    return Annotations(
        path=path,
        image_ids=image_ids,
        names=file_names(path, images),
        category_ids=[categories[at]["id"] for at in order],
        classes=[class_name(path, categories[at]) for at in order],
        ids=numbers_or_objects([row.get("id") for row in rows]),
        areas=areas([row.get("area") for row in rows], boxes),
        crowd=np.array([row.get("iscrowd") == 1 for row in rows], bool),
        reasons=judge(**columns),
        **columns,
    )


def unique_ids(path: Path, key: str, rows: list[dict[str, Any]]) -> np.ndarray:
    """The rows' ids (n,) int64. DataError for one that stands twice."""
    try:
        ids = np.array([row["id"] for row in rows], np.int64)
    except OverflowError as error:
        raise DataError(f"{path}: {key} have an id of more than 64 bits") from error
    values, counts = np.unique(ids, return_counts=True)
    if (twice := values[counts > 1]).size:
        raise DataError(f"{path}: two of its {key} have the id {twice[0]}")
    return ids


def class_name(path: Path, category: dict[str, Any]) -> str:
    """A line of classes.txt. DataError for what cannot be written."""
    name = " ".join(category["name"].split())
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: the name of category {category['id']} is no text: {name!a}"
        ) from error
    return name


def file_names(path: Path, images: list[dict[str, Any]]) -> np.ndarray:
    """(N,) bytes."""
    try:
        return np.array([os.fsencode(row["file_name"]) for row in images])
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: no file can be called {error.object!r}") from error


def numbers_or_objects(values: list) -> np.ndarray:
    """An array that, if it can, keeps no object of the JSON alive: a few that are left keep all of
    its memory, some GB for COCO's."""
    if all(type(value) is int for value in values):
        with suppress(OverflowError):
            return np.array(values, np.int64)
    found = np.empty(len(values), object)
    found[:] = values
    return found


def position(places: dict[int, int], key: object, otherwise: int) -> int:
    """places[key], also for what cannot be a key."""
    try:
        return places.get(key, otherwise)
    except TypeError:
        return otherwise


def as_corners(boxes: list) -> np.ndarray:
    """[x, y, width, height] of M boxes -> x1 y1 x2 y2 (M, 4), NaN for others."""
    with np.errstate(all="ignore"):
        try:
            found = np.array(boxes, np.float64).reshape(len(boxes), 4)
        except (TypeError, ValueError, OverflowError):
            found = np.array([four_numbers(box) for box in boxes])
        found[:, 2:] += found[:, :2]
        return found.astype(np.float32)


def four_numbers(box: object) -> list[float]:
    """The box, or four NaN."""
    try:
        return np.array(box, np.float64).reshape(4).tolist()
    except (TypeError, ValueError, OverflowError):
        return [np.nan] * 4


def areas(given: list, boxes: np.ndarray) -> np.ndarray:
    """(M,): the given ones where they are numbers, else the boxes'."""
    with np.errstate(all="ignore"):
        own = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return np.array([number(g, o) for g, o in zip(given, own)], float)


def number(given: object, otherwise: float) -> float:
    """What is a number, and not too large for one."""
    with suppress(OverflowError):
        return float(given) if isinstance(given, (int, float)) else otherwise
    return otherwise


def judge(
    *,
    sizes: np.ndarray,
    images: np.ndarray,
    labels: np.ndarray,
    boxes: np.ndarray,
    segmentations: Segmentations | None,
) -> np.ndarray:
    """The first reason (M,) int64 that holds against each annotation, 0 where there is none. In
    float32, as transforms.clipped computes: what passes here passes there."""
    limits = np.tile(sizes[images], 2).astype(
        np.float32
    )  # -1 is the last image here, and dropped anyway
    with np.errstate(all="ignore"):
        sides = boxes[:, 2:] - boxes[:, :2]
        inside = np.clip(boxes, 0, limits)
        visible = inside[:, 2:] - inside[:, :2]
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
