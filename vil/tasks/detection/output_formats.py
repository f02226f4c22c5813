"""What pictures show, as text: lines for people, JSON for programs, a COCO file for other tools.

Every row of FORMATS takes what was found in each picture and the names of the classes, and gives
the text piece by piece: only COCO's file has to wait for the last picture.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vil.tasks.detection.coco_eval import to_results
from vil.tasks.detection.detections import Detections


class Shown(NamedTuple):
    """What was found in a picture of size (H, W), or why it could not be read."""

    file: str
    size: tuple[int, int] = (0, 0)
    found: Detections | None = None
    error: str = ""


def as_text(shown: Iterable[Shown], names: list[str]) -> Iterator[str]:
    """A line per picture and one per object: class, score, x1 y1 x2 y2 in pixels."""
    wide = max(map(len, names))
    for file, _, found, error in shown:
        if found is None:
            yield f"{file}: cannot be read: {error}\n"
            continue
        yield f"{file}: {len(found)} object{'' if len(found) == 1 else 's'}\n"
        for label, score, box in rows(found):
            sides = " ".join(f"{side:7.1f}" for side in box)
            yield f"  {names[label - 1]:{wide}} {score:6.3f} {sides}\n"


def as_json(shown: Iterable[Shown], names: list[str]) -> Iterator[str]:
    """An array of {file, width, height, objects: [{class, label, score, box}]} or {file, objects,
    error}, one picture per line."""
    before = "[\n"
    for file, (height, width), found, error in shown:
        record: dict[str, Any] = {"file": file}
        record |= {"error": error} if found is None else {"width": width, "height": height}
        record["objects"] = [
            {"class": names[label - 1], "label": label, "score": score, "box": box}
            for label, score, box in (() if found is None else rows(found))
        ]
        yield before + json.dumps(record)
        before = ",\n"
    yield "\n]\n"


def as_coco(shown: Iterable[Shown], names: list[str]) -> Iterator[str]:
    """One file {images, categories, annotations} in COCO's format, whose annotations have a score:
    what labelling tools read. Images are numbered from 1 as they come, categories are labels."""
    images, annotations = [], []
    labels = list(range(1, len(names) + 1))
    for number, (file, size, found, _) in enumerate(shown, start=1):
        if found is None:
            continue
        height, width = size
        images.append({"id": number, "file_name": file, "width": width, "height": height})
        rows_of = to_results(found, image_id=number, size=size, category_ids=labels)
        for at, row in enumerate(rows_of):
            area = row["bbox"][2] * row["bbox"][3]
            if found.masks is not None:
                area = int(found.masks[at].pixels.sum())
            number_of_row = {"id": len(annotations) + 1, "area": area, "iscrowd": 0}
            annotations.append({**number_of_row, **row})
    categories = [{"id": label, "name": name} for label, name in zip(labels, names)]
    yield json.dumps({"images": images, "categories": categories, "annotations": annotations})
    yield "\n"


def rows(found: Detections) -> Iterable[tuple[int, float, list[float]]]:
    """Label, score and box of each."""
    return zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist())


FORMATS = {"text": as_text, "json": as_json, "coco": as_coco}
