"""Draw the images of a test set with most errors beside their ground truth.

An error is a missed object or a false positive: detections with a score of MIN_SCORE or more are
matched by descending score with objects of their class at an IoU of MIN_IOU, one each. Crowds are
neither missed nor false positives.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_area, box_iou
from torchvision.transforms.v2.functional import to_pil_image

from vil.tasks.detection.coco_eval import decode_rle, load_truth
from vil.tasks.detection.data.coco_json import parse_boxes
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.detections import Detections, crop_masks, from_target
from vil.tasks.detection.visualize import draw, stack_side_by_side

MIN_SCORE = MIN_IOU = 0.5
TITLES = ("truth", f"detections, score {MIN_SCORE:g} and more")


def draw_worst(
    dataset: CocoDataset, results: Iterable[dict], count: int, folder: Path, name: str
) -> list[Path]:
    """Write `<name>-<n>-<image>.png` of the `count` images with most errors, in descending order,
    and remove those of an earlier call. Unreadable images are skipped."""
    rows_of = group_by_image(row for row in results if row["score"] >= MIN_SCORE)
    errors = count_errors(load_truth(dataset.annotations, "bbox"), rows_of)
    ids = dataset.image_ids.tolist()
    worst = sorted(range(len(ids)), key=lambda index: -errors[ids[index]])[:count]
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    written = []
    for number, index in enumerate(worst, start=1):
        try:
            image, target = dataset[index]
        except OSError:  # reported by the loader
            continue
        file = f"{name}-{number:0{len(str(count))}}-{Path(dataset.sample_name(index)).stem}.png"
        detections = from_results(rows_of[ids[index]], dataset.category_ids)
        written.append(folder / file)
        draw_pair(to_pil_image(image), target, detections, dataset.classes).save(written[-1])
    return written


def draw_pair(
    image: Image.Image, target: dict, detections: Detections, classes: list[str]
) -> Image.Image:
    """Draw the ground truth and the detections side by side."""
    truth = draw(image, from_target(target), classes, scores=False)
    return stack_side_by_side(truth, draw(image, detections, classes), TITLES)


def group_by_image(rows: Iterable[dict]) -> dict[int, list[dict]]:
    """Group rows by image id, with an empty list for other images."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["image_id"]].append(row)
    return groups


def count_errors(truth: dict[str, Any], results: dict[int, list[dict]]) -> dict[int, int]:
    """Count the errors of every image id; results of an image are sorted by score."""
    objects = group_by_image(truth["annotations"])
    return {
        row["id"]: count_image_errors(objects[row["id"]], results[row["id"]])
        for row in truth["images"]
    }


def count_image_errors(objects: list[dict], results: list[dict]) -> int:
    """Count missed objects and false positives of one image."""
    single = [row for row in objects if not row["iscrowd"]]
    crowds = [row for row in objects if row["iscrowd"]]
    iou = box_iou(to_boxes(results), to_boxes(single)) * is_same_class(results, single)
    covered = coverage(to_boxes(results), to_boxes(crowds)) * is_same_class(results, crowds)
    missed, wrong = len(single), 0
    for i in range(len(results)):
        if len(single) and iou[i].max() >= MIN_IOU:
            iou[:, iou[i].argmax()] = 0  # match each object once
            missed -= 1
        else:
            wrong += not (len(crowds) and covered[i].max() >= MIN_IOU)
    return missed + wrong


def to_boxes(rows: list[dict]) -> Tensor:
    """Return the boxes of rows, (n, 4) float32."""
    return torch.from_numpy(parse_boxes([row["bbox"] for row in rows]))


def is_same_class(results: list[dict], objects: list[dict]) -> Tensor:
    """Compare the categories of n results and m objects, (n, m) bool."""
    a, b = (
        torch.tensor([row["category_id"] for row in rows], dtype=torch.long)
        for rows in (results, objects)
    )
    return a[:, None] == b


def coverage(boxes: Tensor, crowds: Tensor) -> Tensor:
    """Compute the fraction of each box inside of each crowd, (n, m), as COCO does."""
    low = torch.maximum(boxes[:, None, :2], crowds[:, :2])
    high = torch.minimum(boxes[:, None, 2:], crowds[:, 2:])
    return (high - low).clamp(min=0).prod(dim=2) / box_area(boxes)[:, None].clamp(min=1e-6)


def from_results(rows: list[dict], category_ids: list[int]) -> Detections:
    """Convert one image's rows of `to_results` back to detections."""
    boxes, masks = to_boxes(rows), None
    if rows and "segmentation" in rows[0]:
        pixels = [torch.from_numpy(decode_rle(row["segmentation"])) > 0 for row in rows]
        masks = crop_masks(torch.stack(pixels), boxes)
    labels = [category_ids.index(row["category_id"]) + 1 for row in rows]
    scores = torch.tensor([row["score"] for row in rows])
    return Detections(boxes, torch.tensor(labels, dtype=torch.long), scores, masks)
