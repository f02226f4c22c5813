"""Scenes: the embedded real default of detection. Scanned digits of scikit-learn's table as objects
on textured grounds, as an ordinary set in COCO's format:

    train/000001.png ...   val/000001.png ...   annotations/instances_{train,val}.json

Train scenes are made of the digits that `digits.py` trains with, val scenes of the others. A digit
is 20 to 80 pixels high, turned by up to 30 degrees, and may be cut by the border and covered by
others, but at least 60 % of its stroke is seen. Masks are the pixels of the stroke that are seen.
"""

import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch.utils.data import DataLoader

from vil.data.dataset import SPLITS
from vil.data.datasets import digits
from vil.data.rle import compress_runs, mask_to_runs
from vil.data.synthetic.render import (
    RIM,
    clutter,
    contrasting,
    enlarged,
    ground,
    ink,
    noise,
    opacity,
)
from vil.data.workers import ignore_signals, start, stop_workers
from vil.utils.errors import DataError

VERSION = 1  # of the pictures; part of the folder's name
NUM_TRAIN, NUM_VAL = 2000, 400  # scenes, if nothing else is asked for
SMALLEST, LARGEST = 20.0, 80.0  # height of a digit in pixels
SHARE = 0.6  # of the scene's shorter side: the height of its largest digit
TURN = np.pi / 6
MOST = 8  # digits of a scene
SEEN = 0.6  # part of a stroke that is seen at least
TRIES = 12  # places that are tried for a digit, which is left out when none suits
CATEGORIES = [{"id": d + 1, "name": str(d), "supercategory": "digit"} for d in range(10)]


@dataclass
class Digit:
    """A digit in a scene: which one, how many pixels its stroke has, and (H, W) which are seen."""

    digit: int
    pixels: int
    seen: np.ndarray


@dataclass
class Drawn:
    """The scenes of a split as they are drawn: a picture's PNG file, (height, width), its digits'
    annotations. `scans` are the digits enlarged (N, H, W), and which they are."""

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
        picture, placed = scene(random, height, width, self.scans)
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "png", compress_level=3)
        return file.getvalue(), (height, width), [annotation(digit) for digit in placed]


def find_scenes(root: str | Path, *, seed: int, train: int, val: int, low: int, high: int) -> Path:
    """The folder below root with the scenes of these settings; written if it is not there.

    Processes that write at once do so each for itself, and the first to end gives them to all.
    """
    folder = Path(root, f"scenes{VERSION}-{train}-{val}-{low}to{high}-seed{seed}")
    if not folder.is_dir():
        try:
            threads = torch.get_num_threads()  # this process's share of the cores
            alone = threads == 1 or multiprocessing.current_process().daemon
            settings = {"seed": seed, "train": train, "val": val, "low": low, "high": high}
            write_scenes(folder, workers=0 if alone else threads, **settings)
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
    """Write a folder of `train` and `val` scenes with sides of `low` to `high` pixels.

    They depend on the seed, the split and their number alone. The folder appears when it is whole.
    FileExistsError when it is there, also by the hand of another process in the meantime.
    """
    if not 48 <= low <= high:
        raise ValueError(f"scenes have sides of 48 <= low <= high pixels, given {low} and {high}")
    if min(train, val) < 1 or seed < 0:
        raise ValueError(f"scenes: train {train} and val {val} from 1, seed {seed} from 0")
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is already there")
    pixels, targets = digits.load()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
        whole = Path(aside, folder.name)
        (whole / "annotations").mkdir(parents=True)
        for split, count in (("train", train), ("val", val)):
            own = digits.split_indices(targets, split)
            scans = [enlarged(scan) for scan in pixels[own]], targets[own]
            write_split(whole, Drawn(seed, split, count, low, high, scans), workers)
        rename_new(whole, folder)


def rename_new(whole: Path, folder: Path) -> None:
    """os.rename, which refuses to put a folder in the place of one that is not empty."""
    try:
        os.rename(whole, folder)
    except OSError as error:
        if folder.is_dir():
            raise FileExistsError(f"{folder} is already there") from error
        raise


def write_split(root: Path, scenes: Drawn, workers: int) -> None:
    """The pictures and the annotation file of a split."""
    (root / scenes.split).mkdir()
    images, annotations = [], []
    for number, (picture, (height, width), rows) in enumerate(drawn(scenes, workers), start=1):
        name = f"{number:06}.png"
        (root / scenes.split / name).write_bytes(picture)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for row in rows:
            annotations.append({"id": len(annotations) + 1, "image_id": number, **row})
    info = {"description": f"scenes of scanned digits, seed {scenes.seed}", "version": str(VERSION)}
    content = {"info": info, "licenses": [], "images": images, "annotations": annotations}
    text = json.dumps({**content, "categories": CATEGORIES}, separators=(",", ":"))
    (root / f"annotations/instances_{scenes.split}.json").write_text(text, "utf-8")


def drawn(scenes: Drawn, workers: int) -> Iterator[tuple]:
    """All scenes in order, drawn by so many worker processes; 0: by this one."""
    loader = DataLoader(
        scenes,
        batch_size=None,
        collate_fn=tuple,
        num_workers=workers,
        worker_init_fn=share_cores,
        generator=torch.Generator(),
    )
    iterator = start(loader)
    try:
        yield from iterator
    finally:
        stop_workers(iterator)


def share_cores(worker_id: int) -> None:
    """One of several processes that draw, whose matrix products are too small for threads."""
    from threadpoolctl import threadpool_limits  # scikit-learn's, which has the digits

    ignore_signals(worker_id)
    threadpool_limits(1, user_api="blas")


def annotation(placed: Digit) -> dict:
    """Category, box, area and mask as COCO's format has them."""
    rows, columns = (np.flatnonzero(placed.seen.any(axis=axis)).tolist() for axis in (1, 0))
    x, y = columns[0], rows[0]
    return {
        "category_id": placed.digit + 1,
        "bbox": [x, y, columns[-1] + 1 - x, rows[-1] + 1 - y],
        "area": int(placed.seen.sum()),
        "iscrowd": 0,
        "segmentation": {
            "size": list(placed.seen.shape),
            "counts": compress_runs(mask_to_runs(placed.seen)),
        },
    }


def scene(
    random: RandomState, height: int, width: int, scans: tuple
) -> tuple[np.ndarray, list[Digit]]:
    """A picture (H, W, 3) uint8 and the digits in it, one at least; `scans` are the digits
    enlarged, and which they are."""
    picture = ground(random, height, width)
    clutter(random, picture)
    placed: list[Digit] = []
    wanted = random.randint(1, MOST + 1)
    while not placed:
        for _ in range(wanted):
            add_digit(random, picture, placed, scans)
    light = 0.8 + 0.35 * noise(random, height, width, 90)
    grain = (random.random_sample((height, width, 3)) - 0.5) * random.uniform(0.02, 0.14)
    picture = picture * light[..., None] + grain
    return (np.clip(picture, 0, 1) * 255).round().astype(np.uint8), placed


def add_digit(random: RandomState, picture: np.ndarray, placed: list[Digit], scans: tuple) -> None:
    """Paint one more digit, where it is seen well enough and leaves enough of the others."""
    height, width = picture.shape[:2]
    fine, targets = scans
    which = random.randint(len(targets))
    largest = min(LARGEST, SHARE * min(height, width))
    size = np.exp(random.uniform(np.log(SMALLEST), np.log(largest)))
    values = ink(fine[which], size, random.uniform(-TURN, TURN), random.uniform(-0.2, 0.2))
    rim = random.random_sample() < 0.3  # a second colour around the stroke
    stroke, around = opacity(values), opacity(values, RIM)
    pixels = int((stroke > 0.5).sum())
    for place in places(random, picture.shape, len(values)):
        seen, cover = (
            laid(part > 0.5, place, height, width) for part in (stroke, around if rim else stroke)
        )
        others = [(other.seen & ~cover).sum() >= SEEN * other.pixels for other in placed]
        if seen.sum() >= SEEN * pixels and all(others):
            break
    else:
        return
    for other in placed:
        other.seen &= ~cover
    placed.append(Digit(int(targets[which]), pixels, seen))
    paint(random, picture, place, stroke, around if rim else None)


def places(random: RandomState, shape: tuple[int, ...], side: int) -> Iterator[tuple[int, int]]:
    """Rows and columns where the corner of a square lies whose centre is in the scene."""
    for _ in range(TRIES):
        row, column = (random.uniform(0, 1, 2) * shape[:2] - side / 2).round().astype(int).tolist()
        yield row, column


def window(
    place: tuple[int, int], side: int, height: int, width: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Where a square lies in the scene, and which part of it lies there."""
    inside = tuple(
        slice(max(at, 0), min(at + side, end)) for at, end in zip(place, (height, width))
    )
    return inside, tuple(slice(s.start - at, s.stop - at) for s, at in zip(inside, place))


def laid(part: np.ndarray, place: tuple[int, int], height: int, width: int) -> np.ndarray:
    """A square (S, S) of booleans as the pixels (H, W) of the scene."""
    whole = np.zeros((height, width), bool)
    inside, own = window(place, len(part), height, width)
    whole[inside] = part[own]
    return whole


def paint(
    random: RandomState,
    picture: np.ndarray,
    place: tuple[int, int],
    stroke: np.ndarray,
    around: np.ndarray | None,
) -> None:
    """The rim, if any, then the stroke, in colours that stand out from what is under them."""
    inside, own = window(place, len(stroke), *picture.shape[:2])
    target = picture[inside]
    for part in (around, stroke):
        if part is None:
            continue
        alpha = part[own][..., None]
        colour = contrasting(random, target[alpha[..., 0] > 0.5])
        shade = 1 + 0.3 * (noise(random, *target.shape[:2], 20) - 0.5)
        target += alpha * (colour * shade[..., None] - target)
