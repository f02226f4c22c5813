"""Read a picture as 8-bit RGB, or raise the one error that means "this file is broken"."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from vil.utils.rgb import to_rgb


class UnreadableImage(OSError):
    """A file that is missing, is no picture, ends too early or would fill the memory."""


def read_image(source: str | Path | BinaryIO) -> Image.Image:
    """The whole picture, decoded. Raises UnreadableImage."""
    with faults_named(), Image.open(source) as image:
        refuse_bomb(image)
        refuse_program(image)
        return to_rgb(image)


def read_size(source: str | Path | BinaryIO) -> tuple[int, int]:
    """Width and height, from the picture's head alone. Raises UnreadableImage."""
    with faults_named(), Image.open(source) as image:
        refuse_bomb(image)
        refuse_program(image)
        return image.size


@contextmanager
def faults_named() -> Iterator[None]:
    """UnreadableImage for whatever PIL raises inside."""
    try:
        yield
    except UnidentifiedImageError as error:  # names a BytesIO by its place in memory
        raise UnreadableImage("UnidentifiedImageError: no picture of a known kind") from error
    except Exception as error:
        # PIL has no common type for a broken file (OSError, SyntaxError, ValueError, struct.error,
        # zlib.error, EOFError, DecompressionBombError, ...), and only PIL runs inside this try.
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error


def refuse_bomb(image: Image.Image) -> None:
    """Raise where PIL only warns; a warnings filter per image would revive all shown warnings."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError(
            f"{image.width} x {image.height} pixels, more than PIL's limit of {limit}"
        )


def refuse_program(image: Image.Image) -> None:
    """PostScript is a program, which PIL would hand to Ghostscript, whatever its file is called."""
    if image.format == "EPS":
        raise UnidentifiedImageError
