"""Count the errors of detections, and draw images with errors next to the ground truth.

An error is a missed object or a false positive in COCO's evaluation. Detections with a score of at
least MIN_SCORE are evaluated, and a match needs an IoU of at least MIN_IOU. Missed crowd regions
and detections inside of crowd regions are not errors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image

from vil.tasks.detection import coco_eval
from vil.tasks.detection.data.coco_json import parse_boxes
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.detections import Detections, crop_masks, from_target
from vil.tasks.detection.visualize import draw
from vil.utils.contact_sheet import save_ranked, stack_side_by_side

MIN_SCORE = MIN_IOU = 0.5
TITLES = ("truth", f"detections, score {MIN_SCORE:g} and more")


def draw_worst(
    dataset: CocoDataset, results: Iterable[dict], count: int, folder: Path, name: str
) -> list[Path]:
    """Draw the `count` images with the most errors, and return the paths of the drawings.

    results: detections in COCO's results format. folder, name: see `save_ranked`.
    """
    ranking = rank_images(dataset, results)

    def draw_errors(index: int) -> Image.Image:
        return draw_pair(dataset, index, ranking.rows)

    return save_ranked(ranking.order, count, draw_errors, dataset.sample_name, folder, name)


class Ranking(NamedTuple):
    """The images of a dataset by their errors.

    order: indices of the images, most errors first. errors: number of errors of each image, by its
    index. rows: {image id: evaluated detections in COCO's results format}.
    """

    order: list[int]
    errors: list[int]
    rows: dict[int, list[dict]]


def rank_images(dataset: CocoDataset, results: Iterable[dict]) -> Ranking:
    """Sort the images of a dataset by their number of errors. results: detections in COCO's results
    format."""
    truth, rows = load_confident(dataset, results)
    counts, by_image = count_errors(truth, rows), defaultdict(list)
    for row in results:
        if row["score"] >= MIN_SCORE:
            by_image[row["image_id"]].append(row)
    errors = [counts[number] for number in dataset.image_ids.tolist()]
    order = sorted(range(len(errors)), key=lambda index: -errors[index])
    return Ranking(order, errors, by_image)


def load_confident(
    dataset: CocoDataset, results: Iterable[dict]
) -> tuple[dict[str, Any], list[dict]]:
    """Return the ground truth of a dataset, and the detected boxes with a score of at least
    MIN_SCORE, as `coco_eval.run_coco_eval` takes them."""
    rows = [row for row in results if row["score"] >= MIN_SCORE]
    truth = coco_eval.load_truth(dataset.annotations, "bbox")
    return truth, coco_eval.select_results(coco_eval.sort_results(rows), "bbox")


def draw_pair(dataset: CocoDataset, index: int, rows: dict[int, list[dict]]) -> Image.Image:
    """Draw the ground truth of an image and, next to it, detections.

    rows: {image id: detections in COCO's results format}. Raises OSError if the image cannot be
    read.
    """
    image, target = dataset[index]
    found = from_results(rows.get(int(dataset.image_ids[index]), []), dataset.category_ids)
    image = to_pil_image(image)
    pair = (
        draw(image, from_target(target), dataset.classes, scores=False),
        draw(image, found, dataset.classes),
    )
    return stack_side_by_side(pair, TITLES)


def count_errors(truth: dict[str, Any], rows: list[dict]) -> Counter[int]:
    """Count the errors in each image: missed objects plus false positives.

    Returns {image id: count}. truth: output of `coco_eval.load_truth`. rows: detected boxes in
    COCO's results format, sorted by `coco_eval.sort_results`.
    """
    objects, detections = match(truth, rows)
    missed = [row for row in objects.values() if row.get("fn") and not row["iscrowd"]]
    wrong = [row for row in detections.values() if row.get("fp")]
    return Counter(row["image_id"] for row in missed + wrong)


def match(
    truth: dict[str, Any], rows: list[dict], **params: Any
) -> tuple[dict[int, dict], dict[int, dict]]:
    """Match detected boxes with objects at an IoU of at least MIN_IOU, without a limit on their
    number.

    Returns ({id: annotation}, {id: detection}) with the marks that `coco_eval.run_coco_eval`
    describes. A matched detection also has `gt_id`, the id of its annotation. params: see
    `coco_eval.run_coco_eval`.
    """
    limits = dict(iouThrs=[MIN_IOU], areaRng=[[0, 1e10]], maxDets=[max(len(rows), 1)])
    matches = coco_eval.run_coco_eval(truth, rows, "bbox", **limits, **params)
    return matches.cocoGt.anns, matches.cocoDt.anns


def count_confusions(truth: dict[str, Any], rows: list[dict]) -> np.ndarray:
    """Count pairs of a true and a detected class: (K + 1, K + 1) int64, where K is background.

    Rows are true classes by category id, columns detected ones. Boxes are matched regardless of
    their class, those of the highest score first. The last row counts detections without an object,
    the last column missed objects. truth, rows: see `count_errors`.
    """
    objects, detections = match(truth, rows, useCats=0)
    ids = sorted(row["id"] for row in truth["categories"])
    place, background = {number: i for i, number in enumerate(ids)}, len(ids)
    matrix = np.zeros((background + 1, background + 1), np.int64)
    for row in detections.values():
        found = objects.get(row.get("gt_id"))
        if found is None:
            matrix[background, place[row["category_id"]]] += 1
        elif not found["iscrowd"]:
            matrix[place[found["category_id"]], place[row["category_id"]]] += 1
    for row in objects.values():
        if row.get("fn") and not row["iscrowd"]:
            matrix[place[row["category_id"]], background] += 1
    return matrix


def from_results(rows: list[dict], category_ids: list[int]) -> Detections:
    """Convert one image's results in COCO's format back to detections.

    rows: output of `coco_eval.to_results`. category_ids: label n has the id category_ids[n - 1].
    """
    boxes, masks = torch.from_numpy(parse_boxes([row["bbox"] for row in rows])), None
    if rows and "segmentation" in rows[0]:
        pixels = [torch.from_numpy(coco_eval.decode_rle(row["segmentation"])) > 0 for row in rows]
        masks = crop_masks(torch.stack(pixels), boxes)
    labels = [category_ids.index(row["category_id"]) + 1 for row in rows]
    scores = torch.tensor([row["score"] for row in rows])
    return Detections(boxes, torch.tensor(labels, dtype=torch.long), scores, masks)
