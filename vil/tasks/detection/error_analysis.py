"""Draw the detections in the images with the most errors, next to the ground truth.

An error is a missed object or a false positive in COCO's evaluation. Detections with a score of at
least MIN_SCORE are evaluated, and a match needs an IoU of at least MIN_IOU. Missed crowd regions
and detections inside of crowd regions are not errors.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms.v2.functional import to_pil_image

from vil.tasks.detection import coco_eval
from vil.tasks.detection.data.coco_json import parse_boxes
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.detections import Detections, crop_masks, from_target
from vil.tasks.detection.visualize import draw, stack_side_by_side

MIN_SCORE = MIN_IOU = 0.5
TITLES = ("truth", f"detections, score {MIN_SCORE:g} and more")


def draw_worst(
    dataset: CocoDataset, results: Iterable[dict], count: int, folder: Path, name: str
) -> list[Path]:
    """Draw the `count` images with the most errors, and return the paths of the drawings.

    results: detections in COCO's results format. name: name of the test set. The drawings are
    `<name>-<n>-<image>.png` in `folder`, where n = 1 for the most errors. Drawings of an earlier
    call are removed. Images that cannot be read are skipped.
    """
    rows = [row for row in results if row["score"] >= MIN_SCORE]
    truth = coco_eval.load_truth(dataset.annotations, "bbox")
    errors = count_errors(truth, coco_eval.select_results(coco_eval.sort_results(rows), "bbox"))
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
        found = [row for row in rows if row["image_id"] == ids[index]]
        detections = from_results(found, dataset.category_ids)
        image = to_pil_image(image)
        pair = (
            draw(image, from_target(target), dataset.classes, scores=False),
            draw(image, detections, dataset.classes),
        )
        written.append(folder / file)
        stack_side_by_side(*pair, TITLES).save(written[-1])
    return written


def count_errors(truth: dict[str, Any], rows: list[dict]) -> Counter[int]:
    """Count the errors in each image: missed objects plus false positives.

    Returns {image id: count}. truth: output of `coco_eval.load_truth`. rows: detected boxes in
    COCO's results format, sorted by `coco_eval.sort_results`.
    """
    limits = dict(iouThrs=[MIN_IOU], areaRng=[[0, 1e10]], maxDets=[max(len(rows), 1)])
    matches = coco_eval.run_coco_eval(truth, rows, "bbox", **limits)
    missed = [row for row in matches.cocoGt.anns.values() if row.get("fn") and not row["iscrowd"]]
    wrong = [row for row in matches.cocoDt.anns.values() if row.get("fp")]
    return Counter(row["image_id"] for row in missed + wrong)


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
