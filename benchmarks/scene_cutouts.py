"""Cut the digits out of the synthetic scenes, and write them to a folder of images by class.

  python benchmarks/scene_cutouts.py cutouts
  vil train --config-file digits/vil_nano.yaml --output_dir runs/cutouts --data cutouts \\
      DATA.TRAIN folder DATA.TEST folder OPTIM.EPOCHS 12 \\
      MODEL.MODEL_PATH vil/weights/vil_nano_digits.safetensors
  python benchmarks/deploy.py --run runs/cutouts --images 1943 --out runs/deploy-cutouts

Each cut-out is a square around the box of a digit, with a margin of a fifth of the box's longer
side. It therefore also shows the clutter around the digit.
"""

import json
import sys
from pathlib import Path

from PIL import Image
from shared import make_parser

from vil.tasks.detection.data.datasets import DETECTION_SETS

MARGIN = 0.2  # on each side of a box, as a fraction of its longer side
SPLITS = ("train", "val")


def cut(image: Image.Image, box: list[float]) -> Image.Image:
    """Return the square around a box (x, y, width, height) in pixels. Parts outside of the image
    are black."""
    x, y, width, height = box
    side = (1 + 2 * MARGIN) * max(width, height)
    left, top = x + (width - side) / 2, y + (height - side) / 2
    return image.crop(tuple(round(value) for value in (left, top, left + side, top + side)))


def write_split(root: Path, scenes: Path, split: str) -> int:
    """Write the cut-outs of a split to root/<split>/<class>/. Returns their number. scenes: folder
    of the dataset."""
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
    parser.add_argument("root", type=Path, help="folder to write; must not exist")
    root = parser.parse_args().root
    if root.exists():
        sys.exit(f"{root} already exists: choose another folder")
    for name in SPLITS:
        print(f"{name}: {write_split(root, root / 'scenes', name)} cut-outs", flush=True)
