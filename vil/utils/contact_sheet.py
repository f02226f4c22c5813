"""Arrange images with captions on one image, a contact sheet."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vil.utils.console import printable
from vil.utils.image_text import load_font

CELL = 320  # pixels of the longer side of an image that has its own caption
THUMBNAIL = 112  # pixels of the longer side of an image in a row with one caption
GAP = 8  # pixels between images
FONT_SIZE = 13  # pixels
LONGEST = 100  # characters of a row's caption


def draw_images(images: Sequence[tuple[Image.Image, str]], columns: int = 4) -> Image.Image:
    """Arrange images, each above its caption, in rows of up to `columns` images.

    images: (image, caption) pairs. Each image is resized so that its longer side has CELL pixels. A
    caption that is too wide is truncated.
    """
    font, columns = load_font(FONT_SIZE), min(columns, len(images))
    width, height = CELL + GAP, CELL + GAP + sum(font.getmetrics())
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, caption) in enumerate(images):
        row, column = divmod(number, columns)
        x, y = GAP + column * width, GAP + row * height
        scale = CELL / max(image.size)
        size = [max(round(side * scale), 1) for side in image.size]
        resample = Image.Resampling.BICUBIC if scale < 1 else Image.Resampling.NEAREST
        sheet.paste(image.convert("RGB").resize(size, resample), (x, y))
        pen.text((x, y + CELL), truncate(caption, font, CELL), fill="black", font=font)
    return sheet


def draw_rows(rows: Iterable[tuple[str, list[Image.Image]]], columns: int, file: Path) -> None:
    """Draw rows (caption, images) of thumbnails to a PNG file. A row has at most `columns` images.

    A caption may have any characters, see `shorten`. Characters that are not in the font are drawn
    as boxes. Raises OSError if the file cannot be written.
    """
    rows, font = list(rows), load_font(FONT_SIZE)
    line = sum(font.getmetrics())
    width, height = THUMBNAIL + GAP, line + THUMBNAIL + 2 * GAP
    size = (columns * width + GAP, max(len(rows), 1) * height + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (caption, images) in enumerate(rows):
        top = GAP + number * height
        text = truncate(shorten(caption), font, size[0] - 2 * GAP)
        pen.text((GAP, top), text, fill="black", font=font)
        for column, image in enumerate(images[:columns]):
            small = image.copy()
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            sheet.paste(small, (GAP + column * width, top + line + 2))
    sheet.save(file, "PNG")


def truncate(caption: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a caption to at most `width` pixels. The end that is removed is replaced by "…"."""
    while caption and font.getlength(caption) > width:
        caption = caption.removesuffix("…")[:-1] + "…" if len(caption) > 1 else ""
    return caption


def shorten(caption: str) -> str:
    """Return a caption as one line of at most LONGEST characters. Control characters and invalid
    UTF-8 are escaped."""
    text = printable(caption).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
