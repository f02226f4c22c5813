"""Cut the digits out of the embedded scenes: a folder of images by class, with clutter around them.

  python benchmarks/scene_cutouts.py cutouts
  vil train --config-file digits/vil_nano.yaml --output_dir runs/cutouts --data cutouts \\
      DATA.TRAIN folder DATA.TEST folder OPTIM.EPOCHS 12 \\
      MODEL.MODEL_PATH vil/weights/vil_nano_digits.safetensors
  vil benchmark deploy --run runs/cutouts --images 1943 --out benchmarks/results/deploy-cutouts

Each cut-out is a square around a box, with a margin of a fifth of its longer side.
"""

import json
import sys
from pathlib import Path

from PIL import Image
from shared import make_parser

from vil.tasks.detection.data.datasets import DETECTION_SETS

MARGIN = 0.2  # of the longer side of a box, on each side
SPLITS = ("train", "val")


def cut(image: Image.Image, box: list[float]) -> Image.Image:
    """Return the square around a box (x, y, width, height); what lies beyond the image is black."""
    x, y, width, height = box
    side = (1 + 2 * MARGIN) * max(width, height)
    left, top = x + (width - side) / 2, y + (height - side) / 2
    return image.crop(tuple(round(value) for value in (left, top, left + side, top + side)))


def write_split(root: Path, scenes: Path, split: str) -> int:
    """Write the cut-outs of a split below root. Returns their number."""
    folder, file = DETECTION_SETS["scenes"](scenes, split)
    content = json.loads(Path(file).read_text())
    names = {row["id"]: row["name"] for row in content["categories"]}
    files = {row["id"]: row["file_name"] for row in content["images"]}
    for row in content["annotations"]:
        target = root / split / names[row["category_id"]] / f"{row['id']:06}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(Path(folder, files[row["image_id"]])) as image:
            cut(image.convert("RGB"), row["bbox"]).save(target)
    return len(content["annotations"])


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("root", type=Path, help="the folder to write")
    root = parser.parse_args().root
    if root.exists():
        sys.exit(f"{root} exists")
    for name in SPLITS:
        print(f"{name}: {write_split(root, root / 'scenes', name)} cut-outs", flush=True)
