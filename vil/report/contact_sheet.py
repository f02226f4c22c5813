"""Draw a contact sheet: rows of thumbnails, each row with a caption."""

from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw

from vil.utils.console import printable
from vil.utils.image_text import load_font

SIDE = 112  # pixels of a thumbnail's longer side
GAP = 6
LONGEST = 100  # characters of a caption


def draw_contact_sheet(
    rows: Iterable[tuple[str, list[Image.Image]]], columns: int, file: Path
) -> None:
    """Draw rows (caption, images) to a PNG file. A row has at most `columns` images.

    A caption may have any characters. Control characters are escaped, and characters that are not
    in the font are drawn as boxes. Raises OSError if the file cannot be written.
    """
    rows, font = list(rows), load_font(13)
    line = sum(font.getmetrics())
    height = line + SIDE + 2 * GAP
    size = (columns * (SIDE + GAP) + GAP, max(len(rows), 1) * height + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (caption, images) in enumerate(rows):
        top = GAP + number * height
        text = shorten(caption)
        while font.getlength(text) > size[0] - 2 * GAP:
            text = text[:-2] + "…"
        pen.text((GAP, top), text, fill="black", font=font)
        for column, image in enumerate(images[:columns]):
            small = image.copy()
            small.thumbnail((SIDE, SIDE))
            sheet.paste(small, (GAP + column * (SIDE + GAP), top + line + 2))
    sheet.save(file, "PNG")


def shorten(caption: str) -> str:
    """Return a caption as one line of at most LONGEST characters. Control characters and invalid
    UTF-8 are escaped."""
    text = printable(caption).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
