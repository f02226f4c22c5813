"""Convert detections to COCO's results format, and compute COCO's average precision in percent.

The library faster_coco_eval computes the same metrics as pycocotools, much faster.

Shapes: precision (T, R, K, A, M) and recall (T, K, A, M), with T = 10 IoU thresholds, R = 101
recall thresholds, K classes, A = 4 area ranges, and M = 3 maximum numbers of detections per image
(1, 10, 100).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torchvision.ops import box_convert

from vil.data.rle import compress_runs, decompress_runs, mask_to_runs, runs_to_mask
from vil.tasks.detection.data import coco_json, masks
from vil.tasks.detection.detections import Detections

IOU_TYPES = {"bbox": "box", "segm": "mask"}  # COCO's iouType: prefix of the metrics' names
THRESHOLDS = {"": slice(None), "50": 0, "75": 5}  # metric suffix: index into T (all, 0.50, 0.75)
AREAS = {"s": 1, "m": 2, "l": 3}  # index into A: < 32 x 32 pixels, < 96 x 96, larger


def to_results(
    detections: Detections, *, image_id: int, size: tuple[int, int], category_ids: list[int | None]
) -> list[dict[str, Any]]:
    """Convert the detections of one image to COCO's results format, a list of dicts.

    Each dict is {image_id, category_id, bbox: [x, y, w, h], score} and, for masks, `segmentation`,
    a compressed RLE. size: (H, W) of the image. category_ids: id of each label, from label 1.
    Detections of a label whose id is None, a category that the annotation file does not have, are
    left out.
    """
    boxes = box_convert(detections.boxes, "xyxy", "xywh")
    columns = (column.tolist() for column in (detections.labels, boxes, detections.scores))
    rows = [
        dict(image_id=image_id, category_id=category_ids[label - 1], bbox=bbox, score=score)
        for label, bbox, score in zip(*columns)
    ]
    for row, mask in zip(rows, detections.masks or ()):
        row["segmentation"] = {"size": list(size), "counts": compress_runs(mask.runs(size))}
    return [row for row in rows if row["category_id"] is not None]


def decode_rle(rle: dict[str, Any]) -> np.ndarray:
    """Decode a mask from COCO's compressed RLE to a bitmap (H, W) uint8."""
    return runs_to_mask(decompress_runs(rle["counts"].encode("ascii")), *rle["size"])


def sort_results(results: Iterable[dict]) -> list[dict]:
    """Sort detections in COCO's results format by image id, then by descending score.

    The order of equal scores affects the metrics. The sort is stable, so detections of an image
    with equal scores keep the order of the model's output, for any number of ranks.
    """
    return sorted(results, key=lambda row: (row["image_id"], -row["score"]))


def select_results(results: Iterable[dict], iou_type: str) -> list[dict]:
    """Copy detections in COCO's results format, with only the fields for one type of evaluation.

    iou_type: "bbox" to drop the masks, "segm" to drop the boxes. In an evaluation of masks, COCO's
    code would take the area of a detection from its box, if it had one.
    """
    dropped = "segmentation" if iou_type == "bbox" else "bbox"
    return [{k: v for k, v in row.items() if k != dropped} for row in results]


class Evaluation(NamedTuple):
    """COCO's evaluation of the boxes or masks of a test set, see the top of this file.

    classes, num_objects: the K class names, and the number of objects of each class without crowds.
    recalls: the R recall thresholds of `precision`.
    """

    classes: list[str]
    num_objects: list[int]
    precision: np.ndarray  # (T, R, K, A, M)
    recall: np.ndarray  # (T, K, A, M)
    recalls: np.ndarray  # (R,)


def average_precision(
    annotations: Path, results: list[dict], iou_types: Iterable[str] = ("bbox",)
) -> dict[str, Any]:
    """Evaluate detections against a COCO annotation file, and return {metric: percent}.

    results: output of `to_results` for all images. iou_types: "bbox" for boxes, "segm" for masks.
    The metrics are those of `summarize`, and all types share the key `per_class`.
    """
    summaries = [summarize(evaluate(annotations, results, name), name) for name in iou_types]
    per_class = {k: v for each in summaries for k, v in each.pop("per_class").items()}
    return {k: v for each in summaries for k, v in each.items()} | {"per_class": per_class}


def evaluate(annotations: Path, results: list[dict], iou_type: str) -> Evaluation:
    """Evaluate detections against a COCO annotation file. results: output of `to_results` for all
    images. iou_type: "bbox" for boxes, "segm" for masks."""
    masked = [row for row in results if "segmentation" in row]
    sizes = {row["image_id"]: row["segmentation"]["size"] for row in masked}
    truth = load_truth(annotations, iou_type, sizes)
    counts = Counter(row["category_id"] for row in truth["annotations"] if not row["iscrowd"])
    num_objects = [counts[number] for number in sorted(row["id"] for row in truth["categories"])]
    rows = select_results(sort_results(results), iou_type)
    evaluation = run_coco_eval(truth, rows, iou_type)
    precision, recall = (np.asarray(evaluation.eval[name]) for name in ("precision", "recall"))
    recalls = np.asarray(evaluation.params.recThrs)
    return Evaluation(class_names(truth["categories"]), num_objects, precision, recall, recalls)


def summarize(evaluation: Evaluation, iou_type: str) -> dict[str, Any]:
    """Return {metric: percent} of an evaluation. iou_type: "bbox" or "segm".

    The metrics of boxes are `box_ap`, `box_ap50`, `box_ap75`, `box_ap_s`, `box_ap_m`, `box_ap_l`
    (small, medium, large objects) and `box_ar100` (recall with at most 100 detections per image).
    The metrics of masks have the prefix `mask_`. The key `per_class` has the AP of each class:
    {"box_ap": {class name: AP}}. A metric is NaN if there are no objects of its class or size, and
    0 if there are objects, but no detections.
    """
    prefix, metrics = IOU_TYPES[iou_type], {}
    for name, i in THRESHOLDS.items():
        metrics[f"{prefix}_ap{name}"] = mean(evaluation.precision[i, ..., 0, -1])
    for name, area in AREAS.items():
        metrics[f"{prefix}_ap_{name}"] = mean(evaluation.precision[..., area, -1])
    metrics[f"{prefix}_ar100"] = mean(evaluation.recall[..., 0, -1])
    class_aps = [mean(each) for each in np.moveaxis(evaluation.precision[..., 0, -1], -1, 0)]
    metrics["per_class"] = {f"{prefix}_ap": dict(zip(evaluation.classes, class_aps))}
    return metrics


def run_coco_eval(truth: dict, rows: list[dict], iou_type: str, **params: Any) -> Any:
    """Run COCO's evaluation without printing, and return the COCOeval object.

    The object's attribute `eval` is a dict with the arrays precision (T, R, K, A, M) and recall
    (T, K, A, M). Their values are -1 where there are no objects. The top of this file describes the
    shapes.

    Args:
        truth: output of `load_truth`.
        rows: detections, sorted by `sort_results` and then converted by `select_results`.
        iou_type: "bbox" or "segm".
        params: attributes to set in `COCOeval.params`. If any is given, the evaluation marks errors
            in the annotations of the returned object: false positives get the key `fp` in
            `cocoDt.anns`, and missed objects get the key `fn` in `cocoGt.anns`.
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
    """Return the mean, in percent, of COCO metrics, ignoring -1; NaN if all values are -1."""
    valid = values[values > -1]
    return 100 * float(valid.mean()) if valid.size else float("nan")


def load_truth(
    path: Path, iou_type: str, sizes: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> dict[str, Any]:
    """Load an annotation file as the ground truth for COCO's evaluation.

    iou_type: "bbox" or "segm". sizes: {image id: (H, W)} of the predicted masks. These sizes
    replace the image sizes in the file, because COCO's evaluation only compares masks of equal
    size.

    An annotation is dropped if its image or category is unknown, or if its box is not four finite
    numbers. Unlike in training, other boxes and crowd regions are kept, as in pycocotools. For
    "segm", the box of an object without a valid segmentation becomes a crowd region, so that it is
    not missed, and a mask in it is no false positive. A missing area is set to the area of the box,
    and a missing iscrowd to 0. Annotations get new ids. Raises DataError if the file is invalid.
    """
    tables = coco_json.read_tables(path)
    rows = tables["annotations"]
    boxes = coco_json.parse_boxes([row.get("bbox") for row in rows])
    usable = np.isfinite(boxes).all(axis=1)
    for key, name in (("images", "image_id"), ("categories", "category_id")):
        known = {row["id"]: True for row in tables[key]}
        usable &= np.array([coco_json.find(known, row.get(name), False) for row in rows], bool)
    segmentations = [row.get("segmentation") for row in rows] if iou_type == "segm" else []
    has_mask = masks.Segmentations(segmentations).usable
    areas = coco_json.parse_areas([row.get("area") for row in rows], boxes).tolist()
    for row in tables["images"]:
        row["height"], row["width"] = sizes.get(row["id"], (row["height"], row["width"]))
    image_sizes = {row["id"]: (row["height"], row["width"]) for row in tables["images"]}
    tables["annotations"] = []
    for i in np.flatnonzero(usable).tolist():
        row = rows[i]
        annotation = {key: row[key] for key in ("image_id", "category_id")}
        # COCO's evaluation interprets id 0 as "not found"
        annotation |= dict(id=i + 1, area=areas[i], iscrowd=int(row.get("iscrowd") == 1))
        annotation["bbox"] = coco_json.parse_box(row["bbox"])
        if iou_type == "segm":
            height, width = size = image_sizes[row["image_id"]]
            if has_mask[i]:
                annotation["segmentation"] = normalize_segmentation(row["segmentation"], size)
            else:
                x1, y1, x2, y2 = np.clip(boxes[i], 0, [width, height] * 2).tolist()
                corners = [x1, y1, x2, y1, x2, y2, x1, y2]
                annotation |= dict(segmentation=[corners], iscrowd=1)
        tables["annotations"].append(annotation)
    return tables


def normalize_segmentation(segmentation: dict | list, size: tuple[int, int]) -> dict | list:
    """Make a segmentation valid for COCO's evaluation, with the same mask as in training.

    Invalid polygons are dropped. An RLE that does not have the `size` (H, W) of the image is
    cropped or padded to this size.
    """
    if isinstance(segmentation, list):
        return [polygon for polygon in segmentation if masks.parse_segmentation([polygon])]
    if tuple(segmentation["size"]) == size:
        return segmentation
    bitmap = masks.Segmentations([segmentation]).bitmap(0, *size)
    return {"size": list(size), "counts": compress_runs(mask_to_runs(bitmap))}


def class_names(categories: list[dict]) -> list[str]:
    """Return the names of COCO categories, sorted by category id.

    If several categories have the same name, the id is appended to each of their names.
    """
    names = {row["id"]: row["name"] for row in sorted(categories, key=lambda row: row["id"])}
    count = Counter(names.values())
    return [name if count[name] == 1 else f"{name} ({id_})" for id_, name in names.items()]
