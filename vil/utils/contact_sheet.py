"""Arrange images with captions in one image."""

from collections.abc import Sequence

from PIL import Image, ImageDraw

from vil.utils.image_text import load_font

CELL = 320  # pixels of the longer side of an image on the sheet
GAP = 8  # pixels between images
FONT_SIZE = 13  # pixels


def contact_sheet(images: Sequence[tuple[Image.Image, str]], columns: int = 4) -> Image.Image:
    """Arrange images in rows of up to `columns`, each above its caption. images: (image, caption)
    pairs.

    Each image is resized so that its longer side has CELL pixels. A caption that is too wide is
    truncated.
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
        while caption and font.getlength(caption) > CELL:
            caption = caption.removesuffix("…")[:-1] + "…" if len(caption) > 1 else ""
        pen.text((x, y + CELL), caption, fill="black", font=font)
    return sheet
