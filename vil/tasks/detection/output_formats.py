"""Output formats of `vil predict`: text, JSON, and COCO's format for other tools.

Each format is a function that takes an iterable of predictions and the class names, and yields
chunks of text. COCO's format is yielded only after the last image.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vil.tasks.detection.coco_eval import to_results
from vil.tasks.detection.detections import Detections
from vil.utils.console import printable
from vil.utils.json_text import format_json, to_json


@dataclass(frozen=True)
class Prediction:
    """Detections in one image, or the error if the image is unreadable.

    size: (H, W) of the image.
    """

    file: str
    size: tuple[int, int] = (0, 0)
    detections: Detections | None = None
    error: str = ""


def as_text(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as text, with one line per image, each followed by a line per object.

    The line of an object has its class, its score, and its box x1 y1 x2 y2 in pixels. names: label
    n has the class name names[n - 1].
    """
    width = max(len(printable(name)) for name in names)
    for prediction in predictions:
        record = to_record(prediction, names)
        file, objects = printable(record["file"]), record["objects"]
        if "error" in record:
            yield f"{file}: cannot be read: {printable(record['error'])}\n"
            continue
        yield f"{file}: {len(objects)} object{'' if len(objects) == 1 else 's'}\n"
        for row in objects:
            sides = " ".join(f"{side:7.1f}" for side in row["box"])
            yield f"  {printable(row['class']):{width}} {row['score']:6.3f} {sides}\n"


def as_json(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line."""
    return format_json(to_record(prediction, names) for prediction in predictions)


def to_record(prediction: Prediction, names: list[str]) -> dict[str, Any]:
    """Convert a prediction to {file, width, height, objects: [{class, label, score, box}]}.

    A box is [x1, y1, x2, y2] in pixels. For an unreadable image, the result is {file, error,
    objects: []}. names: label n has the class name names[n - 1].
    """
    file, detections = prediction.file, prediction.detections
    if detections is None:
        return {"file": file, "error": prediction.error, "objects": []}
    height, width = prediction.size
    columns = (x.tolist() for x in (detections.labels, detections.scores, detections.boxes))
    objects = [
        {"class": names[label - 1], "label": label, "score": score, "box": box}
        for label, score, box in zip(*columns)
    ]
    return {"file": file, "width": width, "height": height, "objects": objects}


def as_coco(predictions: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """Format predictions as a COCO annotation file with scores, for labeling tools.

    Image ids number the predictions from 1. Unreadable images are omitted. Category ids are the
    labels. names: label n has the class name names[n - 1].
    """
    images, annotations = [], []
    labels = list(range(1, len(names) + 1))
    for image_id, prediction in enumerate(predictions, start=1):
        detections = prediction.detections
        if detections is None:
            continue
        file, size = prediction.file, prediction.size
        image = {"id": image_id, "file_name": file, "width": size[1], "height": size[0]}
        images.append(image)
        rows = to_results(detections, image_id=image_id, size=size, category_ids=labels)
        for i, row in enumerate(rows):
            area = row["bbox"][2] * row["bbox"][3]
            if detections.masks is not None:
                area = int(detections.masks[i].pixels.sum())
            annotations.append({"id": len(annotations) + 1, "area": area, "iscrowd": 0, **row})
    categories = [{"id": label, "name": name} for label, name in zip(labels, names)]
    yield to_json({"images": images, "categories": categories, "annotations": annotations})
    yield "\n"


FORMATS = {"text": as_text, "json": as_json, "coco": as_coco}
