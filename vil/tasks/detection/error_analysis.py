"""The pictures of a test set in which a detector is most wrong, drawn beside their truth.

A mistake is an object that was not found, or a find that is no object: in the order of their
scores, those of SURE and more are matched with the objects of their class of which they cover
enough (IoU), each with one; crowds are neither missed nor found wrongly.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_area, box_iou

from vil.tasks.detection.coco_eval import decoded, truth_of
from vil.tasks.detection.data.coco_json import as_corners
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.detections import Detections, cropped, from_target
from vil.tasks.detection.visualize import beside, draw

SURE = 0.5  # scores from here on count, and are drawn
ENOUGH = 0.5  # IoU of a find and its object
TITLES = ("truth", f"found, score {SURE:g} and more")


def draw_worst(
    dataset: CocoDataset, results: Iterable[dict], count: int, folder: Path, name: str
) -> list[Path]:
    """`<name>-<n>-<image>.png` of the `count` pictures with most mistakes, the worst being the
    first, those of an earlier call being removed; of equally wrong ones the first of the set. One
    that cannot be read is left out."""
    of_image = by_image(row for row in results if row["score"] >= SURE)
    wrong = mistakes(truth_of(dataset.annotations, "bbox"), of_image)
    ids = dataset.image_ids.tolist()
    worst = sorted(range(len(ids)), key=lambda index: -wrong[ids[index]])[:count]
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    written = []
    for number, index in enumerate(worst, start=1):
        try:
            image, target = dataset[index]
        except OSError:  # the loader has told of it
            continue
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        found = from_rows(of_image[ids[index]], dataset.category_ids)
        pair = (
            draw(picture, from_target(target), dataset.classes, scores=False),
            draw(picture, found, dataset.classes),
        )
        stem = Path(dataset.sample_name(index)).stem
        written.append(folder / f"{name}-{number:0{len(str(count))}}-{stem}.png")
        beside(*pair, TITLES).save(written[-1])
    return written


def by_image(rows: Iterable[dict]) -> dict[int, list[dict]]:
    """{image id: its rows}, empty for others."""
    found = defaultdict(list)
    for row in rows:
        found[row["image_id"]].append(row)
    return found


def mistakes(truth: dict[str, Any], found: dict[int, list[dict]]) -> dict[int, int]:
    """{image id: mistakes} of every image of the set; the best find of an image comes first."""
    objects = by_image(truth["annotations"])
    return {row["id"]: mistakes_in(objects[row["id"]], found[row["id"]]) for row in truth["images"]}


def mistakes_in(objects: list[dict], found: list[dict]) -> int:
    """Those of one image."""
    single = [row for row in objects if not row["iscrowd"]]
    crowds = [row for row in objects if row["iscrowd"]]
    alike = box_iou(corners(found), corners(single)) * same_class(found, single)
    within = covered(corners(found), corners(crowds)) * same_class(found, crowds)
    missed, wrong = len(single), 0
    for overlaps, in_crowds in zip(alike, within):
        if len(single) and overlaps.max() >= ENOUGH:
            alike[:, overlaps.argmax()] = 0  # each object once
            missed -= 1
        else:
            wrong += not (len(crowds) and in_crowds.max() >= ENOUGH)
    return missed + wrong


def corners(rows: list[dict]) -> Tensor:
    """(n, 4) float32."""
    return torch.from_numpy(as_corners([row["bbox"] for row in rows]))


def same_class(found: list[dict], objects: list[dict]) -> Tensor:
    """(n, m) bool."""
    ours, theirs = (
        torch.tensor([row["category_id"] for row in rows], dtype=torch.long)
        for rows in (found, objects)
    )
    return ours[:, None] == theirs


def covered(found: Tensor, crowds: Tensor) -> Tensor:
    """(n, m): the part of each find that lies in each crowd, as COCO measures it."""
    low = torch.maximum(found[:, None, :2], crowds[:, :2])
    high = torch.minimum(found[:, None, 2:], crowds[:, 2:])
    return (high - low).clamp(min=0).prod(dim=2) / box_area(found)[:, None].clamp(min=1e-6)


def from_rows(rows: list[dict], category_ids: list[int]) -> Detections:
    """What `to_results` made of one picture's detections, back from it."""
    boxes, masks = corners(rows), None
    if rows and "segmentation" in rows[0]:
        whole = [torch.from_numpy(decoded(row["segmentation"])) > 0 for row in rows]
        masks = cropped(torch.stack(whole), boxes)
    labels = [category_ids.index(row["category_id"]) + 1 for row in rows]
    scores = torch.tensor([row["score"] for row in rows])
    return Detections(boxes, torch.tensor(labels, dtype=torch.long), scores, masks)
