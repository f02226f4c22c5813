"""Annotation files with everything that is wrong in real ones, and their pictures."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as oracle

# Pictures of odd sizes: file name, width, height.
IMAGES = (("a.png", 40, 30), ("deep/er/b.png", 21, 33), ("c.jpg", 17, 17), ("empty.png", 50, 8))
SQUARE = [[2, 3, 12, 3, 12, 13, 2, 13]]
CATEGORIES = [{"id": 7, "name": "seven"}, {"id": 2, "name": "two"}]


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
    """root/pictures and root/file.json, whose paths are returned."""
    folder, file = Path(root, "pictures"), Path(root, "file.json")
    random = np.random.default_rng(0)
    for name, width, height in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    file.write_text(json.dumps(content(annotations, images, **more)))
    return folder, file
