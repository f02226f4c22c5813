"""Draw detections: boxes with class and score, masks as a tint.

A class has the same color in all images: seven colors of Okabe and Ito, distinguishable with any
color vision (https://jfly.uni-koeln.de/color), then darker, then lighter, then again.
"""

from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from vil.tasks.detection.detections import Detections, Mask

OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#f0e442")
SHADES = ((1.0, 0), (0.6, 0), (0.5, 128))  # factor and offset: unchanged, darker, lighter
TINT = 110  # of 255: opacity of masks
MIN_SIZE = 480  # pixels of the longer side: smaller images are enlarged to fit class names
TEXT_HEIGHTS, LINE_WIDTHS = 55, 350  # per longer side
GAP = 8  # pixels between two images
Color = tuple[int, int, int]


def class_color(label: int) -> Color:
    """Return the color of a label (from 1)."""
    shade, index = divmod(label - 1, len(OKABE_ITO))
    factor, offset = SHADES[shade % len(SHADES)]
    channels = ImageColor.getrgb(OKABE_ITO[index])
    return tuple(round(factor * channel + offset) for channel in channels)


def draw(
    image: Image.Image, detections: Detections, classes: list[str], *, scores: bool = True
) -> Image.Image:
    """Draw detections onto a copy, the best on top; a small image is enlarged by an integer."""
    factor = -(-MIN_SIZE // max(image.size))
    canvas = image.convert("RGB").resize((image.width * factor, image.height * factor))
    labels = detections.labels.tolist()
    worst_first = range(len(labels) - 1, -1, -1)
    for i in worst_first if detections.masks is not None else ():
        tint(canvas, detections.masks[i], class_color(labels[i]), factor)
    pen = ImageDraw.Draw(canvas)
    font = load_font(max(max(canvas.size) // TEXT_HEIGHTS, 11))
    width = max(round(max(canvas.size) / LINE_WIDTHS), 1)
    for i in worst_first:
        text = classes[labels[i] - 1] + (f" {float(detections.scores[i]):.2f}" if scores else "")
        box = (factor * detections.boxes[i]).tolist()
        draw_box(pen, box, text, class_color(labels[i]), font, width)
    return canvas


def tint(canvas: Image.Image, mask: Mask, color: Color, factor: int) -> None:
    """Blend an object's pixels with a color."""
    if not mask.pixels.size:
        return
    alpha = Image.fromarray(mask.pixels.astype(np.uint8) * TINT)
    size = (alpha.width * factor, alpha.height * factor)
    alpha = alpha.resize(size, Image.Resampling.NEAREST)
    canvas.paste(color, (mask.left * factor, mask.top * factor), alpha)


def draw_box(
    pen: ImageDraw.ImageDraw, box: list[float], text: str, color: Color, font, width: int
) -> None:
    """Draw a box with its text above, or inside at the top of the image."""
    left, top, right, bottom = (round(side) for side in box)
    right, bottom = max(right - 1, left), max(bottom - 1, top)  # x2, y2 are exclusive
    pen.rectangle((left, top, right, bottom), outline=color, width=width)
    height = sum(font.getmetrics())
    y = top - height if top >= height else top
    pen.rectangle((left, y, left + round(font.getlength(text)) + 2, y + height), fill=color)
    dark = sum(w * channel for w, channel in zip((0.299, 0.587, 0.114), color)) < 128
    pen.text((left + 1, y), text, fill="white" if dark else "black", font=font)


@lru_cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Load matplotlib's font, which is always installed and covers most scripts but East Asia's."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def stack_side_by_side(
    left: Image.Image, right: Image.Image, titles: tuple[str, str]
) -> Image.Image:
    """Join two images of one size in a row, each below its title."""
    font = load_font(14)
    top = sum(font.getmetrics()) + 4
    canvas = Image.new("RGB", (2 * left.width + GAP, left.height + top), "white")
    pen = ImageDraw.Draw(canvas)
    for image, title, x in zip((left, right), titles, (0, left.width + GAP)):
        canvas.paste(image, (x, top))
        pen.text((x + 2, 2), title, fill="black", font=font)
    return canvas
