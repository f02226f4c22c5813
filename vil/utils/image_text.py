"""Draw text onto images, for visualizations of predictions."""

from functools import lru_cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

MIN_SIZE = 480  # pixels of the longer side: smaller images are enlarged to fit text
TEXT_HEIGHTS = 55  # heights of a line of text in the longer side
Color = tuple[int, int, int]


def enlarge(image: Image.Image) -> tuple[Image.Image, int]:
    """Return (RGB copy of an image, integer factor by which the copy is enlarged).

    The factor is the smallest for which the longer side of the copy has at least MIN_SIZE pixels.
    """
    factor = -(-MIN_SIZE // max(image.size))
    return image.convert("RGB").resize((image.width * factor, image.height * factor)), factor


@lru_cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Load the font that ships with matplotlib, which has no East Asian characters. size: in
    pixels."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def font_for(canvas: Image.Image) -> ImageFont.FreeTypeFont:
    """Load the font at a size that is readable on an image."""
    return load_font(max(max(canvas.size) // TEXT_HEIGHTS, 11))


def draw_text(
    pen: ImageDraw.ImageDraw, x: int, y: int, text: str, color: Color, font: ImageFont.FreeTypeFont
) -> int:
    """Draw a line of text on a rectangle filled with `color`. Returns its height in pixels.

    pen: draws on the image. x, y: the upper left corner of the rectangle.
    """
    height = sum(font.getmetrics())
    pen.rectangle((x, y, x + round(font.getlength(text)) + 2, y + height), fill=color)
    dark = sum(w * channel for w, channel in zip((0.299, 0.587, 0.114), color)) < 128
    pen.text((x + 1, y), text, fill="white" if dark else "black", font=font)
    return height
