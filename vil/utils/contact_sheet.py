"""Arrange images with captions on one image, a contact sheet. Save drawings of ranked images."""

from collections.abc import Callable, Iterable, Sequence
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


def stack_side_by_side(images: Sequence[Image.Image], titles: Sequence[str]) -> Image.Image:
    """Return an image that shows images of equal size side by side, with titles above them."""
    font, step = load_font(14), images[0].width + GAP
    top = sum(font.getmetrics()) + 4
    canvas = Image.new("RGB", (len(images) * step - GAP, images[0].height + top), "white")
    pen = ImageDraw.Draw(canvas)
    for number, (image, title) in enumerate(zip(images, titles)):
        canvas.paste(image, (number * step, top))
        pen.text((number * step + 2, 2), title, fill="black", font=font)
    return canvas


def save_ranked(
    order: Sequence[int],
    count: int,
    draw: Callable[[int], Image.Image],
    sample_name: Callable[[int], str],
    folder: Path,
    name: str,
) -> list[Path]:
    """Draw the first `count` images of a ranking, and return the paths of the drawings.

    The drawings are `<name>-<n>-<image>.png` in `folder`, where n = 1 for the first image. Drawings
    of an earlier call are removed. Images that cannot be read are skipped. order: indices of the
    images. draw: draws an image, or raises OSError if it cannot be read. sample_name: returns the
    path of an image. name: name of the test set.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    written = []
    for number, index in enumerate(order[:count], start=1):
        try:
            drawing = draw(index)
        except OSError:  # reported by the loader
            continue
        file = f"{name}-{number:0{len(str(count))}}-{Path(sample_name(index)).stem}.png"
        written.append(folder / file)
        drawing.save(written[-1])
    return written


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
