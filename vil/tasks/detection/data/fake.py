"""Render synthetic images with boxes in COCO's format, for dry runs and tests."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vil.data.dataset import SPLITS

OBJECTS = 8  # per image


def write_fake(
    root: str | Path, split: str, *, n: int, size: int, num_classes: int, height: int | None = None
) -> None:
    """Write n images of height (3/4 size) x size pixels with filled rectangles on noise to
    root/<split>, and root/annotations/instances_<split>.json. They only depend on (split, index).
    """
    folder = Path(root, split)
    folder.mkdir(parents=True, exist_ok=True)
    height, width = height or max(1, 3 * size // 4), size
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
            ImageDraw.Draw(image).rectangle(
                (x, y, x + w - 1, y + h - 1), fill=tuple(random.integers(64, 256, 3).tolist())
            )
            annotations.append({
                "id": len(annotations) + 1, "image_id": index, "category_id": label + 1,
                "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
            })  # fmt: skip
        image.save(folder / f"{index}.png", compress_level=1)
    categories = [{"id": c + 1, "name": f"category {c + 1}"} for c in range(num_classes)]
    file = Path(root, "annotations", f"instances_{split}.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
