"""Draw detections: boxes with class and score, and tinted masks.

The first seven classes have the colors of Okabe and Ito (https://jfly.uni-koeln.de/color), which
people with color blindness can distinguish. The next seven have darker versions, and the seven
after them lighter versions. Then the colors repeat.
"""

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from vil.tasks.detection.detections import Detections, Mask
from vil.utils.image_text import Color, draw_text, enlarge, font_for

OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#f0e442")
SHADES = ((1.0, 0), (0.6, 0), (0.5, 128))  # factor and offset: unchanged, darker, lighter
TINT = 110  # of 255: opacity of masks
LINE_WIDTHS = 350  # the longer side of an image is this many line widths of a box


def class_color(label: int) -> Color:
    """Return the RGB color of a class. label: label of the class, from 1."""
    shade, index = divmod(label - 1, len(OKABE_ITO))
    factor, offset = SHADES[shade % len(SHADES)]
    channels = ImageColor.getrgb(OKABE_ITO[index])
    return tuple(round(factor * channel + offset) for channel in channels)


def draw(
    image: Image.Image, detections: Detections, classes: list[str], *, scores: bool = True
) -> Image.Image:
    """Draw detections onto a copy of the image, with the highest scores on top.

    classes: class names; the first one belongs to label 1. scores: whether to write the scores next
    to the classes. A small image is first enlarged by an integer factor.
    """
    canvas, factor = enlarge(image)
    labels = detections.labels.tolist()
    worst_first = range(len(labels) - 1, -1, -1)
    for i in worst_first if detections.masks is not None else ():
        tint(canvas, detections.masks[i], class_color(labels[i]), factor)
    pen = ImageDraw.Draw(canvas)
    font = font_for(canvas)
    width = max(round(max(canvas.size) / LINE_WIDTHS), 1)
    for i in worst_first:
        text = classes[labels[i] - 1] + (f" {float(detections.scores[i]):.2f}" if scores else "")
        box = (factor * detections.boxes[i]).tolist()
        draw_box(pen, box, text, class_color(labels[i]), font, width)
    return canvas


def tint(canvas: Image.Image, mask: Mask, color: Color, factor: int) -> None:
    """Blend a color into the pixels of an object's mask.

    canvas: the image, enlarged by the integer `factor`. The function changes it in place.
    """
    if not mask.pixels.size:
        return
    alpha = Image.fromarray(mask.pixels.astype(np.uint8) * TINT)
    size = (alpha.width * factor, alpha.height * factor)
    alpha = alpha.resize(size, Image.Resampling.NEAREST)
    canvas.paste(color, (mask.left * factor, mask.top * factor), alpha)


def draw_box(
    pen: ImageDraw.ImageDraw, box: list[float], text: str, color: Color, font, width: int
) -> None:
    """Draw a box x1 y1 x2 y2 with lines of `width` pixels, and write `text` above it.

    If there is no space above the box, the text is written inside the box.
    """
    left, top, right, bottom = (round(side) for side in box)
    right, bottom = max(right - 1, left), max(bottom - 1, top)  # x2, y2 are exclusive
    pen.rectangle((left, top, right, bottom), outline=color, width=width)
    height = sum(font.getmetrics())
    draw_text(pen, left, top - height if top >= height else top, text, color, font)
