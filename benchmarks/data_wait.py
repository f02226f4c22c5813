"""Measure how long the training of vil_tiny waits for images, on generated JPEG files.

  python benchmarks/data_wait.py [--images 640] [--batch 16] [--workers 2] [--precision bf16]

The images are blurred noise of 500 x 375 px with quality 90, which takes as long to decode as a
photograph. The augmentation is that of the config. Prints the time of a step, and the percentage of
it in which the loop waits for the next batch: for the steps until the first log line, in which the
workers start, and for all later steps.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageFilter
from shared import CPU, make_parser, run_vil

from vil.utils.machine import machine

CONFIG = "imagenet/vil_tiny.yaml"
SIZE = (500, 375)
CLASSES = 4
EVERY = 5  # steps between two log lines


def write_images(folder: Path, count: int) -> None:
    """Write a folder train/ with `count` images, and a folder val/ with one image per class."""
    noise = torch.Generator().manual_seed(0)
    for split, images in (("train", count), ("val", CLASSES)):
        for number in range(images):
            pixels = torch.randint(256, (SIZE[1], SIZE[0], 3), dtype=torch.uint8, generator=noise)
            image = Image.fromarray(pixels.numpy()).filter(ImageFilter.GaussianBlur(2))
            file = folder / split / f"class{number % CLASSES}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file, quality=90)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder, "data"), args.images)
        keys = {
            "DATA.PATH": f"{folder}/data",
            "DATA.TRAIN": "[folder]",
            "DATA.TEST": "[folder]",
            "DATA.NUM_CLASSES": CLASSES,
            "DATALOADER.BSZ": args.batch,
            "DATALOADER.WORKERS": args.workers,
            "AMP.ENABLED": args.precision == "bf16",
            "OPTIM.EPOCHS": 1,
            "SOLVER.WARMUP_EPOCHS": 0,
            "LOG_FREQ": EVERY,
            "DEVICE": "cpu",
        }
        options = [f"{key}={value}" for key, value in keys.items()]
        run_vil("train", CONFIG, Path(folder, "run"), *options)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    points = [point for point in map(json.loads, lines) if point["split"] == "train"]
    about = machine(CPU)
    print(f"\n{about['name']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{CONFIG}, {args.precision}, {args.batch} images per step, {args.workers} workers")
    first, rest = points[:1], points[1:]
    for name, some in ((f"first {EVERY} steps", first), ("all later steps", rest)):
        data, time = (sum(point[key] for point in some) for key in ("data", "time"))
        print(f"{name}: {1e3 * time / len(some):.0f} ms, waiting for data {data / time:.2%}")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=640, help="training images (640)")
    parser.add_argument("--batch", type=int, default=16, help="images per step (16)")
    parser.add_argument("--workers", type=int, default=2, help="loader workers (2)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    run(parser.parse_args())
