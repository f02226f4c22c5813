"""Apply the EXIF orientation of an image."""

from PIL import Image, ImageOps

from vil.utils.errors import StoppedError

ORIENTATION, SWAPPED = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values that swap width and height
TIFF_WIDTH, TIFF_HEIGHT = 256, 257  # tags


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, where 1 is upright. Invalid EXIF data count as 1.

    Does not decode pixels: if a PNG stores its EXIF data after the pixels and is not loaded yet,
    the result is 1.
    """
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        return image.getexif().get(ORIENTATION, 1)
    except StoppedError:  # a signal in the main process
        raise
    except Exception:  # PIL raises any exception for invalid EXIF data; the pixels are valid
        return 1


def turn_upright(image: Image.Image) -> None:
    """Rotate and mirror a loaded image in place, so that its orientation becomes 1."""
    if orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) of an opened image after `turn_upright`. Does not decode pixels,
    see `orientation`."""
    size = image.size
    if tags := getattr(image, "tag_v2", None):  # PIL has already swapped the size of a TIFF file
        size = tags[TIFF_WIDTH], tags[TIFF_HEIGHT]
    return size[::-1] if orientation(image) in SWAPPED else size
