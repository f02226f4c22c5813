"""Predicted classes of the pixels of images: output formats of `vil predict`, and drawings.

Shapes: K classes, image height H and width W. Each output format is a function that takes an
iterable of predictions and the names of the K classes, and yields chunks of text.
"""

import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw
from PIL.ImageFont import FreeTypeFont

from vil.utils.console import printable
from vil.utils.contact_sheet import shorten, truncate
from vil.utils.image_text import draw_text, enlarge, font_for
from vil.utils.json_text import format_json

logger = logging.getLogger(__name__)

OPACITY = 0.5  # of the colors that are drawn onto an image
HATCHING = 12  # pixels between the lines on pixels without a label
GAP = 4  # pixels between the entries of a legend
MIN_LEGEND = 200  # pixels: the legend of a narrow image is wider than the image
PALETTE_SIZE = 256  # maximum number of classes of an image with a palette


@dataclass(frozen=True)
class Prediction:
    """The classes of the pixels of one image, or the error if the image is unreadable.

    size: (H, W) of the image. classes: (H, W) int16 array of class numbers. It is None if the image
    is unreadable, or if the array was written to a file piece by piece. palette: (K, 3) uint8, an
    RGB color for each class. probabilities: (K, H, W) float16. counts: (K,) number of pixels of
    each class, if they are known without `classes`.
    """

    file: str
    size: tuple[int, int] = (0, 0)
    classes: np.ndarray | None = None
    palette: np.ndarray | None = None
    error: str = ""
    probabilities: np.ndarray | None = None
    counts: np.ndarray | None = None

    def shares(self) -> list[tuple[int, int, float]]:
        """Return (class number, number of pixels, share of the pixels from 0 to 1) of each class
        that occurs in the image, the most frequent class first."""
        counts = self.counts
        if counts is None:
            rows, length = self.classes, len(self.palette)
            counts = sum(np.bincount(row, minlength=length) for row in rows)
        order = [n for n in np.argsort(-counts, kind="stable").tolist() if counts[n]]
        total = self.size[0] * self.size[1]
        return [(n, int(counts[n]), int(counts[n]) / total) for n in order]


def as_text(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[str]:
    """Format predictions as text, with one line per image, each followed by a line per class that
    occurs in the image, with the share of its pixels."""
    width = max(len(printable(name)) for name in names)
    for prediction in predictions:
        record = to_record(prediction, names)
        file, classes = printable(record["file"]), record["classes"]
        if "error" in record:
            yield f"{file}: cannot be read: {printable(record['error'])}\n"
            continue
        yield f"{file}: {len(classes)} class{'' if len(classes) == 1 else 'es'}\n"
        for row in classes:
            yield f"  {printable(row['class']):{width}} {100 * row['share']:7.2f} %\n"


def as_json(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[str]:
    """Format predictions as a JSON array with one image per line."""
    return format_json(to_record(prediction, names) for prediction in predictions)


def to_record(prediction: Prediction, names: Sequence[str]) -> dict[str, Any]:
    """Convert a prediction to {file, height, width, classes: [{class, index, pixels, share}]}.

    A share is a number from 0 to 1. For an unreadable image, the result is {file, error,
    classes: []}.
    """
    if prediction.error:
        return {"file": prediction.file, "error": prediction.error, "classes": []}
    height, width = prediction.size
    classes = [
        {"class": names[index], "index": index, "pixels": pixels, "share": share}
        for index, pixels, share in prediction.shares()
    ]
    return {"file": prediction.file, "height": height, "width": width, "classes": classes}


FORMATS = {"text": as_text, "json": as_json}


def draw_prediction(
    image: Image.Image, prediction: Prediction, names: Sequence[str], outputs: Sequence[str]
) -> dict[str, Image.Image | np.ndarray]:
    """Return what `vil predict --output` writes for an image: {end of the file name: drawing}.

    outputs: values of SEGMENTATION.TEST.OUTPUTS. "overlay" is the result of `overlay`, without a
    suffix, "classes" that of `index_image`, and "probabilities" the (K, H, W) float16 array. names:
    of the classes.
    """
    drawings = {}
    if "overlay" in outputs:
        drawings[""] = overlay(image, prediction, names)
    if "classes" in outputs:
        drawings["-classes"] = index_image(prediction.classes, prediction.palette)
    if "probabilities" in outputs:
        drawings["-probabilities"] = prediction.probabilities
    return drawings


def index_image(classes: np.ndarray, palette: np.ndarray) -> Image.Image:
    """Return an image of mode P whose pixels are class numbers, with a palette.

    A palette has at most PALETTE_SIZE colors. For more classes, the mode is I;16, numbers of 16
    bits without a palette, and a warning is logged. classes: (H, W) class numbers. palette: (K, 3).
    """
    if len(palette) > PALETTE_SIZE:
        warn_of_gray(len(palette))
        return Image.fromarray(classes.astype(np.uint16))
    image = Image.fromarray(classes.astype(np.uint8))
    image.putpalette(np.asarray(palette, np.uint8).tobytes())  # changes the mode from L to P
    return image


@cache
def warn_of_gray(num_classes: int) -> None:
    """Log a warning, once, that images of classes have no colors."""
    text = "PNG files of classes have 16-bit gray values and no colors, because a palette has at "
    text += "most %d colors, and there are %d classes"
    logger.warning(text, PALETTE_SIZE, num_classes)


def encode_index(classes: np.ndarray, palette: np.ndarray) -> bytes:
    """Return the content of a PNG file with class numbers, see `index_image`."""
    return encode_png(index_image(classes, palette))


def encode_png(image: Image.Image) -> bytes:
    """Return the content of a PNG file with an image."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def decode_index(content: bytes) -> np.ndarray:
    """Return the class numbers (H, W) int16 in the content of a PNG file of `encode_index`."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image).astype(np.int16)


def overlay(image: Image.Image, prediction: Prediction, names: Sequence[str]) -> Image.Image:
    """Draw the colors of the classes onto a copy of the image, and a legend below it.

    The legend has the classes that occur in the image, with the share of their pixels, the most
    frequent class first. A small image is first enlarged by an integer factor. names: of the
    classes.
    """
    canvas, _ = enlarge(image)
    colors = colorize(prediction.classes, prediction.palette, canvas.size)
    labels = [
        (f"{shorten(names[index])} {100 * share:.1f} %", prediction.palette[index])
        for index, _, share in prediction.shares()
    ]
    return add_legend(Image.blend(canvas, colors, OPACITY), labels, font_for(canvas))


def colorize(classes: np.ndarray, palette: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Draw the classes of pixels as an RGB image of a size (width, height).

    classes: (H, W) class numbers; pixels with a negative number have no label, and are hatched in
    gray. Each pixel of the result has the class of the nearest pixel.
    """
    rows, columns = (np.arange(n) * old // n for n, old in zip(size[::-1], classes.shape))
    classes = classes[rows[:, None], columns]
    colors = np.asarray(palette, np.uint8)[np.maximum(classes, 0)]
    y, x = np.nonzero(classes < 0)
    colors[y, x] = np.where((y + x) % HATCHING < HATCHING // 2, 90, 190)[:, None]
    return Image.fromarray(colors)


def add_legend(
    image: Image.Image, labels: Sequence[tuple[str, Sequence[int]]], font: FreeTypeFont
) -> Image.Image:
    """Return an image with a legend below it. labels: (text, RGB color) of each entry."""
    width, height = max(image.width, MIN_LEGEND), sum(font.getmetrics())
    boxes, x, y = [], GAP, image.height + GAP
    for text, color in labels:
        text = truncate(text, font, width - 2 * GAP - 2)
        step = round(font.getlength(text)) + 3 + GAP
        if x + step > width and x > GAP:
            x, y = GAP, y + height + GAP
        boxes.append((x, y, text, tuple(map(int, color))))
        x += step
    canvas = Image.new("RGB", (width, y + height + GAP), "white")
    canvas.paste(image, (0, 0))
    pen = ImageDraw.Draw(canvas)
    for box in boxes:
        draw_text(pen, *box, font)
    return canvas


def default_palette(num_classes: int) -> np.ndarray:
    """Return distinct RGB colors for the classes of a dataset without colors: (K, 3) uint8.

    The first 20 are matplotlib's tab20, the saturated ones first. The others are `voc_palette`.
    """
    tab20 = np.array(matplotlib.colormaps["tab20"].colors)
    first = (255 * np.concatenate([tab20[::2], tab20[1::2]])).round().astype(np.uint8)
    return np.concatenate([first, voc_palette(num_classes)[len(first) :]])[:num_classes]


def voc_palette(num_classes: int) -> np.ndarray:
    """Return the colors of Pascal VOC, (K, 3) uint8, which spread the bits of the class number over
    the high bits of the three channels."""
    bits = np.arange(num_classes)[:, None] >> np.arange(24) & 1  # bits[n, 3 * j + channel]
    return np.packbits(bits.astype(np.uint8).reshape(-1, 8, 3), axis=1)[:, 0]
