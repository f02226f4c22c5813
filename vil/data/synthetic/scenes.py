"""Render scenes for object detection: scikit-learn's scanned digits on textured backgrounds.

The scenes are written as a dataset in COCO's format:

    train/000001.png ...   val/000001.png ...   annotations/instances_{train,val}.json

Train scenes use the training digits of `digits.py`, and val scenes its validation digits. A digit
is 20 to 80 pixels high, and rotated by up to 30 degrees. The border and other digits hide at most
40 % of its stroke. Its mask contains the visible pixels.

Shapes: H, W size of a scene.
"""

import io
import json
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vil.data.dataset import SPLITS
from vil.data.datasets import digits
from vil.data.rle import compress_runs, mask_to_runs
from vil.data.synthetic import render
from vil.data.workers import ignore_signals, iter_batches
from vil.utils.errors import DataError

VERSION = 1  # of the images; part of the folder's name
NUM_TRAIN, NUM_VAL = 2000, 400  # default numbers of scenes
SMALLEST, LARGEST = 20.0, 80.0  # height of a digit in pixels
MAX_SHARE = 0.6  # height of the largest digit, relative to the shorter side of the scene
MAX_ANGLE = np.pi / 6
MAX_DIGITS = 8  # in a scene
MIN_VISIBLE = 0.6  # fraction of each stroke
TRIES = 12  # positions tried for a digit before it is left out
CATEGORIES = [{"id": d + 1, "name": str(d), "supercategory": "digit"} for d in range(10)]


@dataclass
class Digit:
    """A digit in a scene: its class, the number of pixels of its stroke, and a bool mask (H, W) of
    those pixels of the stroke that are visible."""

    digit: int
    pixels: int
    visible: np.ndarray


@dataclass
class SceneDataset(Dataset):
    """The scenes of a split. An item is (PNG bytes, (height, width), annotations).

    low, high: range of a scene's height and width in pixels. scans: enlarged digits and their
    classes.
    """

    seed: int
    split: str
    count: int
    low: int
    high: int
    scans: tuple[list[np.ndarray], np.ndarray]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[bytes, tuple[int, int], list[dict]]:
        key = np.random.SeedSequence((self.seed, SPLITS[self.split], index + 1))
        random = RandomState(np.random.MT19937(key))
        height, width = random.randint(self.low, self.high + 1, 2).tolist()
        image, placed = render_scene(random, height, width, self.scans)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png", compress_level=3)
        return file.getvalue(), (height, width), [annotate(digit) for digit in placed]


def find_scenes(root: str | Path, **settings: int) -> Path:
    """Return the folder of scenes with the given settings. If it is missing, render the scenes.

    settings: seed, train, val, low and high of `write_scenes`, all required. Several processes may
    call this at the same time. Raises DataError if the folder cannot be written.
    """
    name = "scenes{version}-{train}-{val}-{low}to{high}-seed{seed}"
    folder = Path(root, name.format(version=VERSION, **settings))
    if not folder.is_dir():
        threads = torch.get_num_threads()  # this process's share of the cores
        single = threads == 1 or multiprocessing.current_process().daemon
        try:
            write_scenes(folder, workers=0 if single else threads, **settings)
        except OSError as error:
            if not folder.is_dir():
                reason = error.strerror or error
                raise DataError(f"the scenes cannot be written to {folder}: {reason}") from error
    return folder


def write_scenes(
    folder: str | Path,
    *,
    seed: int = 0,
    train: int = NUM_TRAIN,
    val: int = NUM_VAL,
    low: int = 128,
    high: int = 192,
    workers: int = 0,
) -> None:
    """Render `train` training and `val` validation scenes into a new folder.

    Sides are `low` to `high` pixels long. A scene depends only on these limits, the seed, the
    split, and its number in the split. The folder appears only when it is complete. Raises
    FileExistsError if it already exists.
    """
    if not 48 <= low <= high:
        raise ValueError(f"scenes need 48 <= low <= high (pixels), given low {low} and high {high}")
    if min(train, val) < 1 or seed < 0:
        given = f"train {train}, val {val} and seed {seed}"
        raise ValueError(f"scenes need train >= 1, val >= 1 and seed >= 0, got {given}")
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} already exists")
    pixels, targets = digits.load()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        new = Path(temporary, folder.name)
        (new / "annotations").mkdir(parents=True)
        for split, count in (("train", train), ("val", val)):
            indices = digits.split_indices(targets, split)
            scans = [render.enlarge(scan) for scan in pixels[indices]], targets[indices]
            write_split(new, SceneDataset(seed, split, count, low, high, scans), workers)
        rename_new(new, folder)


def rename_new(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. Raises FileExistsError if `folder` exists and is not empty."""
    try:
        os.rename(new, folder)
    except OSError as error:
        if folder.is_dir():
            raise FileExistsError(f"{folder} already exists") from error
        raise


def write_split(root: Path, scenes: SceneDataset, workers: int) -> None:
    """Render the scenes of a split, and write the images and the annotation file below root.

    workers: number of processes that render; 0 renders in this process.
    """
    (root / scenes.split).mkdir()
    images, annotations = [], []
    options = dict(num_workers=workers, worker_init_fn=init_worker, generator=torch.Generator())
    loader = DataLoader(scenes, batch_size=None, collate_fn=tuple, **options)
    for number, (data, (height, width), rows) in enumerate(iter_batches(loader), 1):
        name = f"{number:06}.png"
        (root / scenes.split / name).write_bytes(data)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for row in rows:
            annotations.append({"id": len(annotations) + 1, "image_id": number, **row})
    info = {"description": f"scenes of scanned digits, seed {scenes.seed}", "version": str(VERSION)}
    content = {"info": info, "licenses": [], "images": images, "annotations": annotations}
    text = json.dumps({**content, "categories": CATEGORIES}, separators=(",", ":"))
    (root / f"annotations/instances_{scenes.split}.json").write_text(text, "utf-8")


def init_worker(worker_id: int) -> None:
    """Ignore signals in a worker, and use one BLAS thread, because the matrices are small."""
    from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

    ignore_signals(worker_id)
    threadpool_limits(1, user_api="blas")


def annotate(placed: Digit) -> dict:
    """Return a digit's annotation in COCO's format, without the keys `id` and `image_id`."""
    mask = placed.visible
    rows, columns = (np.flatnonzero(mask.any(axis=axis)).tolist() for axis in (1, 0))
    x, y = columns[0], rows[0]
    box = [x, y, columns[-1] + 1 - x, rows[-1] + 1 - y]
    runs = {"size": list(mask.shape), "counts": compress_runs(mask_to_runs(mask))}
    row = {"category_id": placed.digit + 1, "bbox": box, "area": int(mask.sum())}
    return {**row, "iscrowd": 0, "segmentation": runs}


def render_scene(random: RandomState, height: int, width: int, scans: tuple) -> tuple:
    """Render a scene with at least one digit. Returns (image (H, W, 3) uint8, list of Digit).

    scans: (list of enlarged digits, their classes).
    """
    image = render.background(random, height, width)
    render.add_clutter(random, image)
    placed: list[Digit] = []
    count = random.randint(1, MAX_DIGITS + 1)
    while not placed:
        for _ in range(count):
            add_digit(random, image, placed, scans)
    light = 0.8 + 0.35 * render.noise(random, height, width, 90)
    grain = (random.random_sample((height, width, 3)) - 0.5) * random.uniform(0.02, 0.14)
    image = image * light[..., None] + grain
    return (np.clip(image, 0, 1) * 255).round().astype(np.uint8), placed


def add_digit(random: RandomState, image: np.ndarray, placed: list[Digit], scans: tuple) -> None:
    """Paint a random digit into `image` and append it to `placed`, both in place.

    Tries up to TRIES random positions, until at least the fraction MIN_VISIBLE of each digit stays
    visible. If no position succeeds, paints nothing. scans: (list of enlarged digits, their
    classes).
    """
    fine, targets = scans
    index = random.randint(len(targets))
    largest = min(LARGEST, MAX_SHARE * min(image.shape[:2]))
    size = np.exp(random.uniform(np.log(SMALLEST), np.log(largest)))
    angle, slant = random.uniform(-MAX_ANGLE, MAX_ANGLE), random.uniform(-0.2, 0.2)
    ink = render.render_ink(fine[index], size, angle, slant)
    layers = [render.opacity(ink)]
    if random.random_sample() < 0.3:
        layers.insert(0, render.opacity(ink, render.OUTLINE))
    pixels = int((layers[-1] > 0.5).sum())
    for _ in range(TRIES):
        inside, local = random_overlap(random, image.shape[:2], len(ink))
        visible, cover = (np.zeros(image.shape[:2], bool) for _ in range(2))
        visible[inside], cover[inside] = layers[-1][local] > 0.5, layers[0][local] > 0.5
        others = [(other.visible & ~cover).sum() >= MIN_VISIBLE * other.pixels for other in placed]
        if visible.sum() >= MIN_VISIBLE * pixels and all(others):
            break
    else:
        return
    for other in placed:
        other.visible &= ~cover
    placed.append(Digit(int(targets[index]), pixels, visible))
    render.paint(random, image[inside], [layer[local] for layer in layers])


def random_overlap(
    random: RandomState, shape: tuple[int, ...], side: int
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the overlap of a scene with a square that is centered at a random point of the scene.

    shape: (H, W) of the scene. side: side of the square in pixels. Returns two indices, each a pair
    of slices (rows, columns). The first selects the overlap from an array of the scene, the second
    from an array of the square.
    """
    corner = (random.uniform(0, 1, 2) * shape - side / 2).round().astype(int).tolist()
    inside = tuple(slice(max(at, 0), min(at + side, end)) for at, end in zip(corner, shape))
    return inside, tuple(slice(s.start - at, s.stop - at) for s, at in zip(inside, corner))
