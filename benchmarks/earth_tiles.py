"""Compare the features of DINOv2 with full and with local attention on tiles of the Earth.

  python benchmarks/earth_tiles.py               writes benchmarks/results/earth-tiles.json
  python benchmarks/earth_tiles.py --pixels 896 --images 50      larger, with fewer tiles

Needs the extras `dinov2` and `geo`. NASA's image of the Earth is cut into tiles of 96 x 96 pixels,
about 700 km high, which overlap by half. A tile is ocean or land if 99 % of its pixels are, lake if
3 % are, and coast if both ocean and land have 10 %; others are left out. Each fourth of the
longitudes has training tiles, then a gap, then test tiles, then a gap, so tiles of different parts
share no pixel. At most --images tiles of a class are drawn from the training part, and half as
many from the test part.

The tiles are resized to --pixels, and the network is the ViT-S/14 `dinov2_small`, with its own
attention and with `MODEL.PATCH_ATTENTION window=8`. Figures are the top-1 of nearest neighbors
(k = 20) and of a linear probe, whose strength is chosen on held-out training tiles, in bfloat16 if
the CPU has it.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from shared import CPU, RESULTS, add_json, make_parser, write_json

from vil.config import get_config
from vil.tasks.segmentation.layouts import EARTH_SIZE, read_earth
from vil.utils.machine import machine
from vil.utils.text_table import align
from vil.workflows.embed import probe

TILE, QUARTERS = 96, 4  # side in pixels, parts of the longitudes
PARTS = {"train": (0.0, 0.6), "val": (0.7, 0.93)}  # {folder: columns of a quarter}
WAYS = {"full": "", "local": "window=8"}  # {name: MODEL.PATCH_ATTENTION}
PIXELS, IMAGES = (224, 448), 200
NETWORK = (
    "MODEL.ARCH=timm/vit_small_patch14_dinov2", "MODEL.MODEL_PATH=dinov2_small",
    "DATA.TRAIN=folder", "DATA.TEST=folder", "DATA.NUM_CLASSES=auto", "DATALOADER.BSZ=8",
    "AMP.ENABLED=True", "INPUT.CROP_PCT=1.0",
)  # fmt: skip


def name_class(mask: np.ndarray) -> str:
    """Return the class of a tile, or "" for none. mask: 0 ocean, 1 land, 2 lake per pixel."""
    ocean, land, lake = ((mask == number).mean() for number in range(3))
    if lake >= 0.03:
        return "lake"
    if max(ocean, land) >= 0.99:
        return "ocean" if ocean > land else "land"
    return "coast" if min(ocean, land) >= 0.1 else ""


def corners(part: str) -> Iterator[tuple[int, int]]:
    """Yield (left, top) of each tile of a part."""
    columns, rows = EARTH_SIZE
    width = columns // QUARTERS
    for quarter in range(QUARTERS):
        start, end = (int(width * (quarter + share)) for share in PARTS[part])
        for left in range(start, end - TILE + 1, TILE // 2):
            for top in range(0, rows - TILE + 1, TILE // 2):
                yield left, top


def write_tile(image: Image.Image, left: int, top: int, folder: Path) -> None:
    """Write a tile to a folder."""
    tile = image.crop((left, top, left + TILE, top + TILE))
    tile.save(folder / f"row{top:04}_column{left:04}.png")


def write_tiles(root: Path, most: int) -> dict[str, dict[str, int]]:
    """Write tiles to root/<part>/<class>/, at most `most` of a class for training and half as many
    for testing. Returns {part: {class: number of tiles}}."""
    image, mask = read_earth()
    counts = {}
    for part in PARTS:
        found = defaultdict(list)
        for left, top in corners(part):
            label = name_class(mask[top : top + TILE, left : left + TILE])
            found[label].append((left, top))
        found.pop("", None)
        limit = most if part == "train" else most // 2
        for label, places in found.items():
            folder = root / part / label
            folder.mkdir(parents=True)
            chosen = np.random.RandomState(0).permutation(len(places))[:limit]
            for left, top in (places[i] for i in chosen):
                write_tile(image, left, top, folder)
        counts[part] = {label: min(limit, len(found[label])) for label in sorted(found)}
    return counts


def run(args: argparse.Namespace) -> None:
    rows, table = [], [["attention", "pixels", "kNN", "linear probe", "minutes"]]
    with tempfile.TemporaryDirectory() as folder:
        counts = write_tiles(Path(folder), args.images)
        print(counts)
        for pixels in args.pixels:
            for way, patch in WAYS.items():
                own = (f"DATA.PATH={folder}", f"INPUT.IMAGE_SIZE={pixels}")
                start = time.monotonic()
                cfg = get_config(None, [*NETWORK, *own, f"MODEL.PATCH_ATTENTION={patch}"])
                knn, _, linear = (next(iter(p.top1.values())) for p in probe(cfg).probes)
                minutes = (time.monotonic() - start) / 60
                figures = dict(knn=round(knn, 2), linear=round(linear, 2))
                rows.append(dict(attention=way, pixels=pixels, **figures))
                table.append([way, str(pixels), f"{knn:.2f}", f"{linear:.2f}", f"{minutes:.1f}"])
                print(rows[-1], flush=True)
    print(align(table))
    result = {"machine": machine(CPU), "tiles": counts, "rows": rows}
    write_json(args.json, result)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser, RESULTS / "earth-tiles.json")
    parser.add_argument("--pixels", type=int, nargs="+", default=list(PIXELS), help="image sides")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"tiles of a class ({IMAGES})")
    run(parser.parse_args())
