"""Output formats of `vil predict`: text, JSON, and COCO's formats for other tools.

Each format is a function that takes an iterable of predictions and the class names, and yields
chunks of text. COCO's formats are yielded only after the last image.
"""

import filecmp
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vil.tasks.detection.coco_eval import to_results
from vil.tasks.detection.detections import Detections
from vil.utils.console import printable
from vil.utils.json_text import format_json, to_json
from vil.utils.plural import plural

logger = logging.getLogger(__name__)


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
        yield f"{file}: {plural(len(objects), 'object')}\n"
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


class Listing(NamedTuple):
    """The images of an annotation file, and its categories.

    images: {file name: (image id, (H, W))}. category_ids: id of each label, from label 1; None for
    a class that the file does not have. file: the annotation file, for messages. folder: folder of
    the images; None if unknown.
    """

    images: Mapping[str, tuple[int | str, tuple[int, int]]]
    category_ids: Sequence[int | None]
    file: Path = Path("the annotation file")
    folder: Path | None = None


def as_coco(
    predictions: Iterable[Prediction],
    names: list[str],
    *,
    category_ids: Sequence[int] = (),
    listings: Callable[[], Iterable[Listing]] = tuple,
) -> Iterator[str]:
    """Format predictions as COCO's results, or as a COCO annotation file with scores.

    If one of the `listings` has all images, the output is an array in COCO's results format, with
    the image ids and category ids of its annotation file. Otherwise, it is an annotation file for
    labeling tools, whose image ids number the predictions from 1. Unreadable images are omitted.

    names: label n has the class name names[n - 1]. category_ids: id of each label in the training
    annotation file; empty if unknown, then the labels are the ids.
    """
    known = list(category_ids) or list(range(1, len(names) + 1))
    shown = [(i, each) for i, each in enumerate(predictions, 1) if each.detections is not None]
    for listing in listings() if shown else ():
        image_ids = find_image_ids([prediction for _, prediction in shown], listing)
        if image_ids:
            logger.warning(
                "the image ids are those of %s, which lists these images: for a file of "
                "annotations instead, set DATA.PATH none",
                listing.file,
            )
            # a class that the annotation file does not have keeps its id, if that id is free
            listed = set(listing.category_ids)
            free = [None if number in listed else number for number in known]
            ids = [n if own is None else own for own, n in zip(listing.category_ids, free)]
            yield from format_json(
                row
                for image_id, (_, prediction) in zip(image_ids, shown)
                for row in to_rows(prediction, image_id, ids)
            )
            return
    images, annotations = [], []
    for image_id, prediction in shown:
        file, size, masks = prediction.file, prediction.size, prediction.detections.masks
        image = {"id": image_id, "file_name": file, "width": size[1], "height": size[0]}
        images.append(image)
        for i, row in enumerate(to_rows(prediction, image_id, known)):
            area = row["bbox"][2] * row["bbox"][3]
            if masks is not None:
                area = int(masks[i].pixels.sum())
            annotations.append({"id": len(annotations) + 1, "area": area, "iscrowd": 0, **row})
    categories = [{"id": number, "name": name} for number, name in zip(known, names)]
    yield to_json({"images": images, "categories": categories, "annotations": annotations})
    yield "\n"


def to_rows(
    prediction: Prediction, image_id: int | str, category_ids: list[int | None]
) -> list[dict[str, Any]]:
    """Convert a prediction to COCO's results format, see `to_results`."""
    options = dict(image_id=image_id, size=prediction.size, category_ids=category_ids)
    return to_results(prediction.detections, **options)


def find_image_ids(predictions: Sequence[Prediction], listing: Listing) -> list[int | str]:
    """Return the id of each predicted image in an annotation file, or [] if one has no clear id.

    An image has the id of the file name with which its path ends, the longest if there are several,
    if the size is the same, no other predicted image has this id, and the files are equal.
    """
    ids = []
    for prediction in predictions:
        parts = Path(os.path.abspath(prediction.file)).parts
        ends = ("/".join(parts[i:]) for i in range(1, len(parts)))
        name = next((end for end in ends if end in listing.images), "")
        image_id, size = listing.images.get(name, (None, None))
        if size != prediction.size:
            return []
        files = [prediction.file, listing.folder / name] if listing.folder else []
        if files and all(map(os.path.isfile, files)) and not filecmp.cmp(*files, shallow=False):
            logger.warning(
                "%s is not the image that %s lists, so the ids of this file are not used",
                printable(prediction.file),
                listing.file,
            )
            return []
        ids.append(image_id)
    return ids if len(set(ids)) == len(ids) else []


FORMATS = {"text": as_text, "json": as_json, "coco": as_coco}
