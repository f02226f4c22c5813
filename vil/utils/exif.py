"""Read the EXIF orientation of an image."""

from PIL import Image

from vil.utils.errors import StoppedError

ORIENTATION, SWAPPED = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values that swap width and height


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, where 1 is upright. Invalid EXIF data count as 1.

    Decodes the pixels of a PNG file, except if its EXIF data come before the pixels.
    """
    try:
        return image.getexif().get(ORIENTATION, 1)
    except StoppedError:  # a signal in the main process
        raise
    except Exception:  # PIL raises any exception for invalid EXIF data; the pixels are valid
        return 1
