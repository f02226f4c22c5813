"""Detections -> results in COCO's format -> average precision.

faster_coco_eval computes the metrics of COCO's own evaluation (tests/tasks/detection compare the
two) in seconds instead of minutes. Metrics are in percent.

Shapes: precision (T, R, K, A, M) and recall (T, K, A, M) of T 10 IoU thresholds, R 101 recalls,
K classes, A 4 area ranges, M 3 limits of detections per image (1, 10, 100).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torchvision.ops import box_convert

from vil.data.rle import compress_runs, decompress_runs, mask_to_runs, runs_to_mask
from vil.tasks.detection.data import coco_json, masks
from vil.tasks.detection.detections import Detections

IOU_TYPES = {"bbox": "box", "segm": "mask"}  # COCO's iouType: prefix of our metrics
THRESHOLDS = {"": slice(None), "50": 0, "75": 5}  # index of T: all, IoU 0.50, IoU 0.75
AREAS = {"s": 1, "m": 2, "l": 3}  # index of A: < 32 x 32 pixels, < 96 x 96, larger


def to_results(
    detections: Detections, *, image_id: int, size: tuple[int, int], category_ids: list[int]
) -> list[dict[str, Any]]:
    """Convert one image's detections to rows {image_id, category_id, bbox (x y w h), score[,
    segmentation]}, where a segmentation is a compressed RLE.

    size: the image's (H, W).
    """
    boxes = box_convert(detections.boxes, "xyxy", "xywh")
    columns = (column.tolist() for column in (detections.labels, boxes, detections.scores))
    rows = [
        dict(image_id=image_id, category_id=category_ids[label - 1], bbox=bbox, score=score)
        for label, bbox, score in zip(*columns)
    ]
    for row, mask in zip(rows, detections.masks or ()):
        row["segmentation"] = {"size": list(size), "counts": compress_runs(mask.runs(size))}
    return rows


def decode_rle(rle: dict[str, Any]) -> np.ndarray:
    """Decode a segmentation of `to_results` to pixels (H, W) uint8."""
    return runs_to_mask(decompress_runs(rle["counts"].encode("ascii")), *rle["size"])


def sort_results(results: Iterable[dict]) -> list[dict]:
    """Sort by image, then by descending score.

    The order of equal scores affects the metrics, so it must not depend on the ranks. Within an
    image it is the model's.
    """
    return sorted(results, key=lambda row: (row["image_id"], -row["score"]))


def select_results(results: Iterable[dict], iou_type: str) -> list[dict]:
    """Drop the segmentation for boxes, and the box for masks, or COCO's evaluation would take the
    area of the box for that of the mask."""
    dropped = "segmentation" if iou_type == "bbox" else "bbox"
    return [{k: v for k, v in row.items() if k != dropped} for row in results]


def average_precision(
    annotations: Path, results: list[dict], iou_types: Iterable[str] = ("bbox",)
) -> dict[str, Any]:
    """Evaluate results on an annotation file, in percent.

    Returns `box_ap`, `box_ap50`, `box_ap75`, `box_ap_s`, `box_ap_m`, `box_ap_l` (small, medium,
    large objects) and `box_ar100` (recall of 100 detections per image), `mask_...` for masks, and
    `per_class` {"box_ap": {class name: AP}, ...}. A metric without an object is NaN, one without a
    detection 0.
    """
    metrics, per_class = {}, {}
    masked = [row for row in results if "segmentation" in row]
    sizes = {row["image_id"]: row["segmentation"]["size"] for row in masked}
    for iou_type in iou_types:
        prefix, truth = IOU_TYPES[iou_type], load_truth(annotations, iou_type, sizes)
        names = class_names(truth["categories"])
        rows = select_results(sort_results(results), iou_type)
        arrays = run_coco_eval(truth, rows, iou_type).eval
        precision, recall = (np.asarray(arrays[name]) for name in ("precision", "recall"))
        for name, i in THRESHOLDS.items():
            metrics[f"{prefix}_ap{name}"] = mean(precision[i, ..., 0, -1])
        for name, area in AREAS.items():
            metrics[f"{prefix}_ap_{name}"] = mean(precision[..., area, -1])
        metrics[f"{prefix}_ar100"] = mean(recall[..., 0, -1])
        class_aps = [mean(precision[:, :, k, 0, -1]) for k in range(len(names))]
        per_class[f"{prefix}_ap"] = dict(zip(names, class_aps))
    return {**metrics, "per_class": per_class}


def run_coco_eval(truth: dict, rows: list[dict], iou_type: str, **params: Any) -> Any:
    """Run COCO's evaluation, silently; return a COCOeval with precision (T, R, K, A, M) and recall
    (T, K, A, M) in `eval`, -1 without an object.

    params: replace its parameters, and mark false positives and missed objects (`fp`, `fn`).
    """
    library, silent = masks.import_faster_coco_eval(), dict(print_function=lambda *_: None)
    coco = library.COCO(truth, **silent)
    evaluation = library.COCOeval_faster(
        coco, coco.loadRes(rows), iouType=iou_type, extra_calc=bool(params), **silent
    )
    vars(evaluation.params).update(params)
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def mean(values: np.ndarray) -> float:
    """Average in percent, without those of -1; NaN for none."""
    valid = values[values > -1]
    return 100 * float(valid.mean()) if valid.size else float("nan")


def load_truth(
    path: Path, iou_type: str, sizes: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> dict[str, Any]:
    """Load an annotation file for COCO's evaluation.

    sizes {image id: (H, W)} override those in the file: masks must have the size of the results.
    Annotations with an unknown image or category, without a box, or for masks without a usable
    segmentation are dropped; others that training drops are evaluated, as usual. Adds the area (of
    the box) and iscrowd (0) where missing, and distinct ids from 1: COCO takes 0 for "not found".
    """
    tables = coco_json.read_tables(Path(path))
    rows = tables["annotations"]
    boxes = coco_json.parse_boxes([row.get("bbox") for row in rows])
    usable = np.isfinite(boxes).all(axis=1)
    for key, name in (("images", "image_id"), ("categories", "category_id")):
        known = {row["id"]: True for row in tables[key]}
        usable &= np.array([coco_json.find(known, row.get(name), False) for row in rows], bool)
    if iou_type == "segm":
        usable &= masks.Segmentations(row.get("segmentation") for row in rows).usable
    areas = coco_json.parse_areas([row.get("area") for row in rows], boxes).tolist()
    for row in tables["images"]:
        row["height"], row["width"] = sizes.get(row["id"], (row["height"], row["width"]))
    image_sizes = {row["id"]: (row["height"], row["width"]) for row in tables["images"]}
    tables["annotations"] = []
    for i in np.flatnonzero(usable).tolist():
        row = rows[i]
        annotation = {key: row[key] for key in ("image_id", "category_id")}
        annotation |= dict(id=i + 1, area=areas[i], iscrowd=int(row.get("iscrowd") == 1))
        annotation["bbox"] = coco_json.parse_box(row["bbox"])
        if iou_type == "segm":
            size = image_sizes[row["image_id"]]
            annotation["segmentation"] = normalize_segmentation(row["segmentation"], size)
        tables["annotations"].append(annotation)
    return tables


def normalize_segmentation(segmentation: dict | list, size: tuple[int, int]) -> dict | list:
    """Drop invalid polygons; crop or pad an RLE to the image's size, as in training."""
    if isinstance(segmentation, list):
        return [polygon for polygon in segmentation if masks.parse_segmentation([polygon])]
    if tuple(segmentation["size"]) == size:
        return segmentation
    bitmap = masks.Segmentations([segmentation]).bitmap(0, *size)
    return {"size": list(size), "counts": compress_runs(mask_to_runs(bitmap))}


def class_names(categories: list[dict]) -> list[str]:
    """Return names sorted by id, as in COCO's evaluation; repeated names get their id appended."""
    names = {row["id"]: row["name"] for row in sorted(categories, key=lambda row: row["id"])}
    count = Counter(names.values())
    return [name if count[name] == 1 else f"{name} ({id_})" for id_, name in names.items()]
