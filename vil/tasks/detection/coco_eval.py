"""From detections to results in COCO's format, and from results to average precision.

faster_coco_eval computes what COCO's own evaluation does (tests/detection compare the two), in
seconds where that takes minutes. Figures are in percent, like a classifier's accuracy.

Letters, of faster_coco_eval's precision (T, R, K, A, M) and recall (T, K, A, M): T 10 IoU
thresholds, R 101 recalls, K classes, A 4 ranges of areas, M 3 numbers of detections per image
(1, 10, 100).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from vil.data.rle import compress_runs, decompress_runs, mask_to_runs, runs_to_mask
from vil.tasks.detection.data.coco_json import areas, as_corners, four_numbers, position, tables
from vil.tasks.detection.data.masks import Segmentations, pieces
from vil.tasks.detection.detections import Detections, Mask
from vil.utils.errors import DataError

KINDS = {"bbox": "box", "segm": "mask"}  # what COCO calls them, and what our figures begin with
THRESHOLDS = {"": slice(None), "50": 0, "75": 5}  # all of T, IoU 0.50, IoU 0.75
AREAS = {"s": 1, "m": 2, "l": 3}  # below 32 x 32 pixels, below 96 x 96, the others; 0: any


def needed() -> ModuleType:
    """faster_coco_eval, which is no part of a plain installation."""
    try:
        import faster_coco_eval
    except ImportError as error:
        raise DataError(
            "detection sets are evaluated by faster_coco_eval: pip install 'vil[detection]'"
        ) from error
    return faster_coco_eval


def to_results(
    found: Detections, *, image_id: int, size: tuple[int, int], category_ids: list[int]
) -> list[dict[str, Any]]:
    """One picture's rows {image_id, category_id, bbox (x y w h), score[, segmentation]}.

    size: the picture's (H, W). A segmentation is a compressed run length whose counts are a str, so
    that rows can be written as JSON.
    """
    sizes = found.boxes[:, 2:] - found.boxes[:, :2]
    columns = zip(
        found.labels.tolist(),
        found.boxes[:, :2].tolist(),
        sizes.tolist(),
        found.scores.tolist(),
    )
    rows = [
        {
            "image_id": image_id,
            "category_id": category_ids[label - 1],
            "bbox": [*corner, *extent],
            "score": score,
        }
        for label, corner, extent, score in columns
    ]
    for row, mask in zip(rows, found.masks or ()):
        row["segmentation"] = encoded(mask, size)
    return rows


def encoded(mask: Mask, size: tuple[int, int]) -> dict[str, Any]:
    """A mask in a picture (H, W) as a compressed run length."""
    return {"size": list(size), "counts": compress_runs(mask.runs(size))}


def decoded(rle: dict[str, Any]) -> np.ndarray:
    """The pixels (H, W) uint8 that `encoded` was given."""
    return runs_to_mask(decompress_runs(rle["counts"].encode("ascii")), *rle["size"])


def in_order(results: Iterable[dict]) -> list[dict]:
    """By image, then the best first: the order in which equal scores count decides figures, and
    must not depend on who computed which image. Equal ones of an image stay as the model gave them.
    """
    return sorted(results, key=lambda row: (row["image_id"], -row["score"]))


def of_kind(results: Iterable[dict], kind: str) -> list[dict]:
    """The rows that COCO's evaluation takes for `kind`. Those of masks have no box: with one, it
    would take the area of the box for that of the mask, and so another size of object."""
    left_out = "segmentation" if kind == "bbox" else "bbox"
    return [{k: v for k, v in row.items() if k != left_out} for row in results]


def average_precision(
    annotations: Path, results: list[dict], kinds: Iterable[str] = ("bbox",)
) -> dict[str, Any]:
    """The figures of results on a file of annotations, in percent.

    For each kind `box_ap`, `box_ap50`, `box_ap75`, `box_ap_s`, `box_ap_m`, `box_ap_l` (small,
    medium, large objects) and `box_ar100` (recall of 100 detections per image), for masks
    `mask_...`; and `per_class` {"box_ap": {name of the class: AP}, ...}. What has no object in the
    set (a size, a class, everything) has no figure: NaN. Without any detection figures are 0.
    """
    figures, per_class = {}, {}
    sizes = {
        row["image_id"]: row["segmentation"]["size"] for row in results if "segmentation" in row
    }
    for kind in kinds:
        truth = truth_of(annotations, kind, sizes)
        names = class_names(truth["categories"])
        precision, recall = evaluated(truth, of_kind(in_order(results), kind), kind)
        figures |= {f"{KINDS[kind]}_{name}": v for name, v in summary(precision, recall).items()}
        of_classes = [mean(precision[:, :, k, 0, -1]) for k in range(len(names))]
        per_class[f"{KINDS[kind]}_ap"] = dict(zip(names, of_classes))
    return {**figures, "per_class": per_class}


def evaluated(truth: dict, rows: list[dict], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Precision (T, R, K, A, M) and recall (T, K, A, M), -1 where there is no object. Prints
    nothing."""
    library = needed()
    coco = library.COCO(truth, print_function=_silent)
    evaluation = library.COCOeval_faster(
        coco, coco.loadRes(rows), iouType=kind, print_function=_silent
    )
    evaluation.evaluate()
    evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])
    return precision, np.asarray(evaluation.eval["recall"])


def _silent(*_: object) -> None:
    """faster_coco_eval tells of its progress through this."""


def summary(precision: np.ndarray, recall: np.ndarray) -> dict[str, float]:
    """COCO's figures of one kind, in percent."""
    return {
        **{f"ap{name}": mean(precision[at, ..., 0, -1]) for name, at in THRESHOLDS.items()},
        **{f"ap_{name}": mean(precision[..., area, -1]) for name, area in AREAS.items()},
        "ar100": mean(recall[..., 0, -1]),
    }


def mean(values: np.ndarray) -> float:
    """In percent, over those that are there (COCO's sign for the others is -1); NaN of none."""
    there = values[values > -1]
    return 100 * float(there.mean()) if there.size else float("nan")


def truth_of(
    path: Path, kind: str, sizes: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> dict[str, Any]:
    """A file of annotations as COCO's evaluation takes it. sizes {image id: (H, W)} count instead
    of those that the file gives: only masks of one size have an IoU.

    What it would stumble over is left out: annotations of images and categories that the file does
    not have, without a box, and for masks those without a usable segmentation. The others of those
    that training drops are evaluated, as everybody does. Added is what small sets leave out: an
    area (of the box), iscrowd (0), and ids that are distinct and not 0: there that is "not found".
    """
    table = tables(Path(path))
    rows = table["annotations"]
    boxes = as_corners([row.get("bbox") for row in rows])
    usable = np.isfinite(boxes).all(axis=1)
    for key, name in (("images", "image_id"), ("categories", "category_id")):
        known = {row["id"]: True for row in table[key]}
        usable &= np.array([position(known, row.get(name), False) for row in rows], bool)
    if kind == "segm":
        usable &= Segmentations(row.get("segmentation") for row in rows).usable
    of_rows = areas([row.get("area") for row in rows], boxes)
    for row in table["images"]:
        row["height"], row["width"] = sizes.get(row["id"], (row["height"], row["width"]))
    size_of = {row["id"]: (row["height"], row["width"]) for row in table["images"]}
    table["annotations"] = [
        {
            "id": at + 1,
            **{key: rows[at][key] for key in ("image_id", "category_id")},
            "bbox": four_numbers(rows[at]["bbox"]),
            "area": float(of_rows[at]),
            "iscrowd": int(rows[at].get("iscrowd") == 1),
            **({"segmentation": drawable(rows[at], size_of)} if kind == "segm" else {}),
        }
        for at in np.flatnonzero(usable).tolist()
    ]
    return table


def drawable(row: dict, size_of: Mapping[int, tuple[int, int]]) -> dict | list:
    """The segmentation without polygons that are none: COCO's tools take one of two points for a
    box. An RLE of another size than the picture's is cut or padded, as in training."""
    segmentation, size = row["segmentation"], size_of[row["image_id"]]
    if isinstance(segmentation, list):
        return [polygon for polygon in segmentation if pieces([polygon])]
    if tuple(segmentation["size"]) == size:
        return segmentation
    bitmap = Segmentations([segmentation]).bitmap(0, *size)
    return {"size": list(size), "counts": compress_runs(mask_to_runs(bitmap))}


def class_names(categories: list[dict]) -> list[str]:
    """In the order of their ids, as COCO's evaluation has them; a name of several has its id."""
    categories = sorted(categories, key=lambda row: row["id"])
    count = Counter(row["name"] for row in categories)
    return [
        row["name"] if count[row["name"]] == 1 else f"{row['name']} ({row['id']})"
        for row in categories
    ]
