"""Read images as 8-bit RGB or as a BandImage. Any kind of broken file raises UnreadableImage."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from vil.data.bands import PIL_CHANNELS, BandImage, from_pages, is_npy, read_npy
from vil.utils.errors import StoppedError
from vil.utils.exif import turn_upright, upright_size
from vil.utils.rgb import WHITE, ValueRangeError, has_transparency, to_rgb
from vil.utils.wide_pixels import check_layout, read_wide


class UnreadableImage(OSError):
    """Error for an image file that is missing, truncated, too large or not an image, or whose value
    range is unknown."""


def read_image(
    source: str | Path | BinaryIO,
    value_range: Sequence[float] = (),
    channels: int = 3,
    background: Sequence[int] = WHITE,
) -> Image.Image | BandImage:
    """Decode an image to 8-bit RGB or to a BandImage, rotated upright by its EXIF orientation.

    value_range: see `to_rgb` and `to_bands`. channels: number of channels that the model takes. For
    1 and 3, the result is RGB. For other numbers, it is a BandImage, and the file must have this
    many channels or pages. background: color (red, green, blue) behind transparent pixels of an RGB
    result, in 0..255. Raises UnreadableImage if the image cannot be decoded.
    """
    if channels not in PIL_CHANNELS:
        return _read_bands(source, value_range, channels)
    with open_image(source) as image:
        wide = read_wide(image, is_required=bool(value_range))
        image.load()
        turn_upright(image)
        return to_rgb(image, value_range, background, wide)


def _read_bands(
    source: str | Path | BinaryIO, value_range: Sequence[float], channels: int
) -> BandImage:
    with readable(source):
        if is_npy(source):
            return read_npy(source, channels, value_range)
    with open_image(source) as image:
        pages = list(_iter_pages(image, channels, is_required=bool(value_range)))
        return from_pages(pages, channels, value_range, image.mode)


def _iter_pages(image: Image.Image, channels: int, *, is_required: bool) -> Iterator[np.ndarray]:
    """Yield the pages of an opened file, rotated upright, as arrays (H, W) or (H, W, C). Each page
    has at least one channel, so it stops after channels + 1 pages: the file then has too many.
    is_required: see `read_wide`."""
    for number in range(min(getattr(image, "n_frames", 1), channels + 1)):
        image.seek(number)
        check_layout(image)
        if (wide := read_wide(image, is_required=is_required)) is not None:
            yield wide
            continue
        page = image.copy()
        turn_upright(page)
        if page.mode in ("P", "PA"):
            page = page.convert("RGBA" if has_transparency(page) else "RGB")
        yield np.asarray(page)


def read_size(source: str | Path | BinaryIO) -> tuple[int, int]:
    """Read the (width, height) from a file's header, with the EXIF orientation applied.

    Raises UnreadableImage if the header cannot be read.
    """
    with open_image(source) as image:
        return upright_size(image)


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
        check_layout(image)
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
