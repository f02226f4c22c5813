"""Read an image as 8-bit RGB, with one exception for every kind of broken file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from vil.utils.errors import StoppedError
from vil.utils.rgb import to_rgb


class UnreadableImage(OSError):
    """A file that is missing, truncated, not an image, or too large to decode."""


def read_image(source: str | Path | BinaryIO) -> Image.Image:
    """Decode an image completely. Raises UnreadableImage."""
    with open_image(source) as image:
        return to_rgb(image)


def read_size(source: str | Path | BinaryIO) -> tuple[int, int]:
    """Width and height from the image header. Raises UnreadableImage."""
    with open_image(source) as image:
        return image.size


@contextmanager
def open_image(source: str | Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image and check its header; turn any exception of PIL into UnreadableImage."""
    try:
        with Image.open(source) as image:
            limit = Image.MAX_IMAGE_PIXELS
            # PIL only warns here; a warnings filter per image would reset all shown warnings.
            if limit is not None and image.width * image.height > limit:
                size = f"{image.width} x {image.height} pixels"
                raise Image.DecompressionBombError(f"{size}, more than PIL's limit of {limit}")
            if image.format == "EPS":  # under any file name: PIL lets Ghostscript execute it
                raise UnidentifiedImageError
            yield image
    except StoppedError:  # a signal that came while the main process decodes
        raise
    except UnidentifiedImageError as error:  # its message has the memory address of a BytesIO
        raise UnreadableImage("UnidentifiedImageError: not an image of a known format") from error
    except Exception as error:
        # PIL has no common type for a broken file (OSError, SyntaxError, ValueError, struct.error,
        # zlib.error, EOFError, DecompressionBombError, ...), and only PIL runs inside this try.
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
