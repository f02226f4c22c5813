"""Render synthetic images with boxes in COCO's format, for dry runs and tests."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vil.data.dataset import SPLITS
from vil.utils.atomic_write import write_aside
from vil.utils.errors import DataError, os_error_as

OBJECTS = 8  # per image
Files = tuple[Path, Path]  # the image folder, the annotation file


def fake_boxes(
    root: str | Path,
    split: str,
    *,
    n: int = 8,
    size: int = 128,
    height: int | None = None,
    num_classes: int = 3,
) -> Files:
    """Render n synthetic images, and return the image folder and the annotation file.

    The files are written to root/fake_boxes, and replace those of an earlier call. split: "train"
    or "val". size: width in pixels. height: height in pixels, by default 3/4 of the width. Raises
    DataError if a file cannot be written.
    """
    folder = Path(root, "fake_boxes")
    with os_error_as(DataError, f"synthetic images cannot be written to {folder}"):
        return write_fake(folder, split, n, (height or max(1, 3 * size // 4), size), num_classes)


def write_fake(
    root: str | Path, split: str, n: int, size: tuple[int, int], num_classes: int
) -> Files:
    """Write n synthetic images of `size` (H, W) and an annotation file.

    The images show filled rectangles on noise. Image i is the same for any n. Returns the image
    folder, root/<split>, and the annotation file, root/annotations/instances_<split>.json.
    """
    folder, (height, width) = Path(root, split), size
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for index in range(n):
        random = np.random.default_rng((SPLITS[split], index))
        noise = random.integers(0, 64, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        images.append({"id": index, "file_name": f"{index}.png", "height": height, "width": width})
        for _ in range(OBJECTS):
            label = int(random.integers(num_classes))
            x, y = (int(random.integers(0, n // 2 + 1)) for n in (width, height))
            w, h = (int(random.integers(2, max(n // 2, 3))) for n in (width, height))
            w, h = min(w, width - x), min(h, height - y)
            color = tuple(random.integers(64, 256, 3).tolist())
            ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), fill=color)
            annotations.append({
                "id": len(annotations) + 1, "image_id": index, "category_id": label + 1,
                "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
            })  # fmt: skip
        with write_aside(folder / f"{index}.png") as aside:  # other ranks may read the file now
            image.save(aside, compress_level=1)
    categories = [{"id": c + 1, "name": f"category {c + 1}"} for c in range(num_classes)]
    file = Path(root, "annotations", f"instances_{split}.json")
    file.parent.mkdir(exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": categories}
    with write_aside(file) as aside:
        aside.write_text(json.dumps(content))
    return folder, file
