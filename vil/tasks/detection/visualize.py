"""Detections as pictures: boxes with their class and score, masks as a tint; the truth beside them.

A class has one colour in all pictures: the seven of Okabe and Ito, which people with any kind of
colour vision tell apart (https://jfly.uni-koeln.de/color), then the same darker, then lighter, then
all over again; the class's name stands at every box.
"""

from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vil.tasks.detection.detections import Detections, Mask

OKABE_ITO = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (213, 94, 0),
    (0, 114, 178),
    (204, 121, 167),
    (240, 228, 66),
)
SHADES = ((1.0, 0), (0.6, 0), (0.5, 128))  # factor and offset: as it is, darker, lighter
TINT = 110  # of 255: how much of a mask's pixels is its colour
SMALLEST = 480  # pixels of the longer side: smaller pictures are enlarged, so that names fit in
LETTERS, LINES = 55, 350  # heights of letters and widths of lines in the longer side
GAP = 8  # pixels between two pictures
Colour = tuple[int, int, int]


def colour_of(label: int) -> Colour:
    """The colour of a class, by its label (from 1)."""
    shade, place = divmod(label - 1, len(OKABE_ITO))
    factor, offset = SHADES[shade % len(SHADES)]
    return tuple(round(factor * part + offset) for part in OKABE_ITO[place])


def draw(
    image: Image.Image, found: Detections, classes: list[str], *, scores: bool = True
) -> Image.Image:
    """The picture with what was found in it; the best is drawn last, above all others. A small
    picture comes out larger, by a whole factor."""
    factor = -(-SMALLEST // max(image.size)) if max(image.size) < SMALLEST else 1
    picture = image.convert("RGB").resize((image.width * factor, image.height * factor))
    worst_first = range(len(found) - 1, -1, -1)
    for at in worst_first if found.masks is not None else ():
        tint(picture, found.masks[at], colour_of(int(found.labels[at])), factor)
    pen = ImageDraw.Draw(picture)
    font = letters(max(max(picture.size) // LETTERS, 11))
    width = max(round(max(picture.size) / LINES), 1)
    for at in worst_first:
        label, box = int(found.labels[at]), (factor * found.boxes[at]).tolist()
        text = (
            f"{classes[label - 1]} {float(found.scores[at]):.2f}" if scores else classes[label - 1]
        )
        frame(pen, box, text, colour_of(label), font, width)
    return picture


def tint(picture: Image.Image, mask: Mask, colour: Colour, factor: int) -> None:
    """Colour an object's pixels."""
    if not mask.pixels.size:
        return
    strength = Image.fromarray(mask.pixels.astype(np.uint8) * TINT)
    size = (strength.width * factor, strength.height * factor)
    strength = strength.resize(size, Image.Resampling.NEAREST)
    picture.paste(colour, (mask.left * factor, mask.top * factor), strength)


def frame(
    pen: ImageDraw.ImageDraw, box: list[float], text: str, colour: Colour, font, width: int
) -> None:
    """A box, and its text above it; inside of it at the upper border of the picture."""
    left, top, right, bottom = (round(side) for side in box)
    right, bottom = max(right - 1, left), max(bottom - 1, top)  # x2, y2 are the pixels after it
    pen.rectangle((left, top, right, bottom), outline=colour, width=width)
    height = sum(font.getmetrics())
    above = top - height if top >= height else top
    pen.rectangle(
        (left, above, left + round(font.getlength(text)) + 2, above + height), fill=colour
    )
    dark = sum(w * part for w, part in zip((0.299, 0.587, 0.114), colour)) < 128
    pen.text((left + 1, above), text, fill="white" if dark else "black", font=font)


@lru_cache
def letters(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib's own font, which is there on every machine and has most of the world's letters
    but those of East Asia."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def beside(left: Image.Image, right: Image.Image, titles: tuple[str, str]) -> Image.Image:
    """Two pictures of one size in a row, each below its title."""
    font = letters(14)
    top = sum(font.getmetrics()) + 4
    both = Image.new("RGB", (2 * left.width + GAP, left.height + top), "white")
    pen = ImageDraw.Draw(both)
    for picture, title, at in zip((left, right), titles, (0, left.width + GAP)):
        both.paste(picture, (at, top))
        pen.text((at + 2, 2), title, fill="black", font=font)
    return both
