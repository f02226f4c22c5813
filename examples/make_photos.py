"""Draw 600 small "photographs" of leaves into photos/, with the faults that real folders have.

  python examples/make_photos.py

Data of docs/tutorials/own_images.md. One class is rare, one file is broken, and three
photographs are in both splits. 20 more, without labels, go to new/.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

COUNTS = {"healthy": 260, "mildew": 160, "spots": 130, "rust": 50}
# what is on a leaf: how many (from, to), radius (from, to), color
MARKS = {
    "healthy": ((0, 1), (1, 2), (0, 0, 0)),
    "mildew": ((4, 9), (7, 15), (215, 220, 210)),
    "spots": ((4, 9), (7, 15), (60, 35, 25)),
    "rust": ((5, 12), (4, 10), (160, 80, 25)),
}
rng = np.random.default_rng(0)


def draw_photo(kind: str) -> Image.Image:
    """A leaf of any size, angle and green on blurred, noisy soil, 120 x 120 px."""
    soil = rng.integers(40, 110, (8, 8, 1)) + rng.integers(0, 30, 3)
    photo = Image.fromarray(soil.astype(np.uint8)).resize((240, 240), Image.Resampling.BICUBIC)
    leaf = Image.new("L", photo.size)
    width, height = rng.uniform(55, 75), rng.uniform(80, 110)
    ImageDraw.Draw(leaf).ellipse((120 - width, 120 - height, 120 + width, 120 + height), fill=255)
    marked = Image.new("RGB", photo.size, tuple(rng.integers((40, 110, 30), (110, 180, 80))))
    draw = ImageDraw.Draw(marked)
    draw.line((120, 0, 120, 240), (40, 90, 30), 3)
    count, radius, color = MARKS[kind]
    for _ in range(rng.integers(*count)):
        at = 120 + rng.uniform(-0.7, 0.7, 2) * (width, height)
        draw.circle(tuple(at), rng.uniform(*radius), tuple(rng.integers(-20, 21, 3) + color))
    angle, center = rng.uniform(0, 360), tuple(rng.integers(-25, 26, 2))
    photo.paste(marked.rotate(angle), center, leaf.rotate(angle))
    photo = photo.filter(ImageFilter.GaussianBlur(rng.uniform(1, 3))).resize((120, 120))
    noisy = np.asarray(photo) + rng.normal(0, 10, (120, 120, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


for kind, count in COUNTS.items():
    for number in range(count):
        split = "val" if number % 5 == 0 else "train"
        file = Path("photos", split, kind, f"{kind}{number:03}.jpg")
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_photo(kind).save(file)
for number in (1, 2, 3):  # the same photo in both splits, under another name
    source = Path(f"photos/train/spots/spots{number:03}.jpg")
    Path(f"photos/val/spots/copy{number}.jpg").write_bytes(source.read_bytes())
Path("new").mkdir(exist_ok=True)
for number in range(20):  # without labels, for the finished model
    draw_photo(list(MARKS)[number % 4]).save(f"new/{number:02}.jpg")
Path("photos/train/healthy/broken.jpg").write_bytes(b"an interrupted copy")
