"""Annotation files with the errors of real ones, and their images."""

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as oracle

from vil.tasks.detection.data.coco_json import MIN_SIDE

# Pictures of odd sizes: file name, width, height.
IMAGES = (("a.png", 40, 30), ("deep/er/b.png", 21, 33), ("c.jpg", 17, 17), ("empty.png", 50, 8))
SQUARE = [[2, 3, 12, 3, 12, 13, 2, 13]]
CATEGORIES = [{"id": 7, "name": "seven \n of\tnine"}, {"id": 2, "name": "two"}]


def box(number, image=1, bbox=(2, 3, 10, 10), category=2, segmentation=SQUARE, **more):
    """An annotation that is right but for what is given."""
    row = {"id": number, "image_id": image, "category_id": category, "bbox": list(bbox)}
    return {**row, "segmentation": segmentation, "area": 100, "iscrowd": 0, **more}


def without(row, *keys):
    return {key: value for key, value in row.items() if key not in keys}


def runs(height, width, fill=(3, 9, 4, 12), form="compressed"):
    """An RLE of a rectangle x1 y1 x2 y2 (exclusive)."""
    bitmap = np.zeros((height, width), np.uint8, order="F")
    x1, y1, x2, y2 = fill
    bitmap[y1:y2, x1:x2] = 1
    if form == "compressed":
        rle = oracle.encode(bitmap)
        return {"size": rle["size"], "counts": rle["counts"].decode()}
    flat = np.concatenate([[0], bitmap.ravel("F"), [2]])
    edges = np.flatnonzero(np.diff(flat))
    return {"size": [height, width], "counts": np.diff([0, *edges]).tolist()}


def content(annotations, images=IMAGES, categories=CATEGORIES):
    rows = [
        {"id": at + 1, "file_name": name, "width": width, "height": height}
        for at, (name, width, height) in enumerate(images)
    ]
    return {"images": rows, "annotations": annotations, "categories": categories}


def write(root, annotations, images=IMAGES, **more):
    """Write root/pictures and root/file.json. Returns their paths."""
    folder, file = Path(root, "pictures"), Path(root, "file.json")
    random = np.random.default_rng(0)
    for name, width, height in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    file.write_text(json.dumps(content(annotations, images, **more)))
    return folder, file


# what is wrong -> the annotation, and a part of the reason
BROKEN = {
    "no width": (box(1, bbox=(5, 5, 0, 9)), "without area"),
    "negative height": (box(1, bbox=(5, 5, 9, -2)), "without area"),
    "NaN": (box(1, bbox=(5, math.nan, 9, 9)), "four finite"),
    "infinite": (box(1, bbox=(5, 5, math.inf, 9)), "four finite"),
    "beyond float32": (box(1, bbox=(5, 5, 1e300, 9)), "four finite"),
    "three numbers": (box(1, bbox=(5, 5, 9)), "four finite"),
    "words": (box(1, bbox=("left", 5, 9, 9)), "four finite"),
    "null": (box(1) | {"bbox": None}, "four finite"),
    "an object": (box(1) | {"bbox": {"x": 1}}, "four finite"),
    "no box": (without(box(1), "bbox"), "four finite"),
    "right of the image": (box(1, bbox=(40, 5, 9, 9)), "outside"),
    "above the image": (box(1, bbox=(5, -9, 9, 9)), "outside"),
    "narrow": (box(1, bbox=(5, 5, 0.9, 9)), f"side under {MIN_SIDE:g} px"),
    "a rim inside": (box(1, bbox=(39.5, 5, 9, 9)), f"side under {MIN_SIDE:g} px"),
    "no such category": (box(1, category=3), "category"),
    "a category's name": (box(1, category="two"), "category"),
    "a list as category": (box(1, category=[2]), "category"),
    "no such image": (box(1, image=99), "an image"),
    "no image": (without(box(1), "image_id"), "an image"),
}
# segmentation -> whether a mask can be drawn of it
SEGMENTATIONS = {
    "none": (None, False),
    "empty": ([], False),
    "an empty polygon": ([[]], False),
    "two points": ([[1, 1, 5, 5]], False),
    "odd": ([[1, 1, 5, 1, 5, 5, 1]], False),
    "a flat list": ([1, 1, 5, 1, 5, 5], False),
    "words": ([["a"] * 6], False),
    "NaN": ([[1, 1, 5, 1, 5, math.nan]], False),
    "far away": ([[1, 1, 1e9, 1, 5, 5]], False),
    "a string": ("1 1 5 5", False),
    "a number": (5, False),
    "one good, one bad": ([[1, 1], *SQUARE], True),
    "string": (runs(30, 40), True),
    "numbers": (runs(30, 40, form="numbers"), True),
    "too short a string": ({"size": [30, 40], "counts": "0"}, False),
    "no such string": ({"size": [30, 40], "counts": "\u00e9\u00fc"}, False),
    "an open string": ({"size": [30, 40], "counts": "oooo"}, False),
    "a long string": ({"size": [30, 40], "counts": "o" * 50 + "0"}, False),
    "negative runs": ({"size": [30, 40], "counts": [1300, -200, 100]}, False),
    "an endless size": ({"size": [10**7, 10**7], "counts": [10**14]}, False),
    "no size": ({"counts": [1200]}, False),
    "a size of one": ({"size": [1200], "counts": [1200]}, False),
    "half a pixel": ({"size": [30.5, 40], "counts": [1220]}, False),
    "no counts": ({"size": [30, 40]}, False),
}
