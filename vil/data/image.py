"""Read images as 8-bit RGB or as a BandImage. Any kind of broken file raises UnreadableImage."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vil.data.bands import PIL_CHANNELS, BandImage, from_pages, is_npy, read_npy
from vil.utils.errors import StoppedError
from vil.utils.exif import SWAPPED, orientation
from vil.utils.rgb import ValueRangeError, to_rgb


class UnreadableImage(OSError):
    """Error for an image file that is missing, truncated, too large or not an image, or whose value
    range is unknown."""


def read_image(
    source: str | Path | BinaryIO, value_range: Sequence[float] = (), channels: int = 3
) -> Image.Image | BandImage:
    """Decode an image to 8-bit RGB or to a BandImage, rotated upright by its EXIF orientation.

    value_range: see `to_rgb` and `to_bands`. channels: number of channels that the model takes. For
    1 and 3, the result is RGB. For other numbers, it is a BandImage, and the file must have this
    many channels or pages. Raises UnreadableImage if the image cannot be decoded.
    """
    if channels not in PIL_CHANNELS:
        return _read_bands(source, value_range, channels)
    with open_image(source) as image:
        image.load()
        _turn_upright(image)
        return to_rgb(image, value_range)


def _read_bands(
    source: str | Path | BinaryIO, value_range: Sequence[float], channels: int
) -> BandImage:
    with readable(source):
        if is_npy(source):
            return read_npy(source, channels, value_range)
    with open_image(source) as image:
        pages = [np.asarray(each) for each in _iter_pages(image, channels)]
        return from_pages(pages, channels, value_range, image.mode)


def _iter_pages(image: Image.Image, channels: int) -> Iterator[Image.Image]:
    """Yield the pages of an opened file, rotated upright. Each page has at least one channel, so it
    stops after channels + 1 pages: the file then has too many."""
    for number in range(min(getattr(image, "n_frames", 1), channels + 1)):
        image.seek(number)
        page = image.copy()
        _turn_upright(page)
        has_alpha = page.mode == "P" and "transparency" in page.info
        yield page.convert("RGBA") if has_alpha else page


def _turn_upright(image: Image.Image) -> None:
    if _orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)


def read_size(source: str | Path | BinaryIO) -> tuple[int, int]:
    """Read the (width, height) from a file's header, with the EXIF orientation applied.

    Raises UnreadableImage if the header cannot be read.
    """
    with open_image(source) as image:
        return image.size[::-1] if _orientation(image) in SWAPPED else image.size


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, where 1 is upright. Does not decode pixels: if a PNG stores its
    EXIF data after the pixels and is not loaded yet, the result is 1."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return orientation(image)


@contextmanager
def open_image(source: str | Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image, check its size and format, and yield it. Any error, including one inside the
    `with` block, is raised as UnreadableImage."""
    with readable(source), Image.open(source) as image:
        limit = Image.MAX_IMAGE_PIXELS
        # PIL only warns here; a warnings filter per image would reset all shown warnings.
        if limit is not None and image.width * image.height > limit:
            raise Image.DecompressionBombError(
                f"the image has {image.width} x {image.height} pixels, more than PIL's limit of "
                f"{limit} pixels"
            )
        if image.format == "EPS":  # with any suffix: PIL runs it in Ghostscript
            raise UnidentifiedImageError
        yield image


@contextmanager
def readable(source: str | Path | BinaryIO) -> Iterator[None]:
    """Convert any error inside the `with` block to UnreadableImage. The block reads the image file
    `source`. Also raises UnreadableImage if `source` is the path of a folder or special file."""
    if isinstance(source, str | Path) and os.path.exists(source) and not os.path.isfile(source):
        raise UnreadableImage("not a regular file")  # opening a named pipe would wait forever
    try:
        yield
    except StoppedError:  # a signal during decoding in the main process
        raise
    except ValueRangeError as error:
        raise UnreadableImage(str(error)) from error
    except UnidentifiedImageError as error:  # its message has the memory address of a BytesIO
        raise UnreadableImage("UnidentifiedImageError: not an image of a known format") from error
    except Exception as error:
        # PIL has no common type for a broken file (OSError, SyntaxError, ValueError, struct.error,
        # zlib.error, EOFError, DecompressionBombError, ...), and only PIL runs inside this try.
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
