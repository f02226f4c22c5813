"""Read what Pillow cannot: color images with 16 bits per channel, and unusual TIFF and PNG files.

Pillow decodes these color images to 8 bits, which are the upper bytes of the values. The file is
decoded a second time for the lower bytes.

Shapes: C channels, H W image size.
"""

import sys

import numpy as np
from PIL import Image

from vil.utils.exif import turn_upright
from vil.utils.rgb import ValueRangeError

PHOTOMETRIC, PLANAR, BITS = 262, 284, 258  # tags of TIFF
SEPARATE = 2  # value of PLANAR
OTHER = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}  # byte order: other
SPLIT = ("RGB", "RGBA", "RGBX", "CMYK")  # layouts whose lower bytes Pillow can decode
KEY_SCALES = {"L;2": 85, "L;4": 17}  # {layout: what Pillow multiplies values with, but not the key}


def check_layout(image: Image.Image) -> None:
    """Raise ValueRangeError for an opened file whose values Pillow would read wrongly.

    Also sets two attributes so that Pillow reads correctly: the transparent value of a PNG file
    with 2 or 4 bits, and an empty filename. Pillow maps the pixels of a file with a name into
    memory, without swapping the sides of a rotated TIFF file.

    image: an image that is not loaded yet.
    """
    image.filename = ""
    layout, key = layout_of(image), image.info.get("transparency")
    if layout in KEY_SCALES and isinstance(key, int):
        image.info["transparency"] = key * KEY_SCALES[layout]
    tags = getattr(image, "tag_v2", {})
    if max(tags.get(BITS) or (8,)) <= 8:
        return
    if tags.get(PHOTOMETRIC) == 0:
        raise ValueRangeError(
            "TIFF files with more than 8 bits in which 0 is white cannot be read: save the image "
            "as MINISBLACK, in which 0 is black"
        )
    if is_planar(image) and len(layout) == 1:
        raise ValueRangeError(
            "uncompressed TIFF files with 16 bits and separate channels cannot be read: save the "
            "image with interleaved channels, or as one page per channel"
        )


def is_planar(image: Image.Image) -> bool:
    """Return whether an opened file is a TIFF file whose channels are stored one after another."""
    return getattr(image, "tag_v2", {}).get(PLANAR) == SEPARATE


def layout_of(image: Image.Image) -> str:
    """Return Pillow's name of how a file stores its pixels, such as "RGB;16B", or "". image: an
    image that is not loaded yet."""
    for _, _, _, args in getattr(image, "tile", ())[:1]:
        layout = args[0] if isinstance(args, tuple) and args else args
        return layout if isinstance(layout, str) else ""
    return ""


def is_wide(image: Image.Image) -> bool:
    """Return whether an opened file has 16 bits per channel, of which Pillow keeps 8. image: an
    image that is not loaded yet."""
    return not image.mode.startswith("I") and ";16" in layout_of(image)[-4:]


def read_wide(image: Image.Image, *, is_required: bool) -> np.ndarray | None:
    """Decode a color image with 16 bits per channel. Returns the pixels (H, W, C) uint16, rotated
    upright, or None if Pillow loses nothing by decoding the image to 8 bits.

    image: an image that was opened, and not loaded yet; this function loads it. is_required: raise
    ValueRangeError for a layout that cannot be decoded, instead of returning None.
    """
    if not is_wide(image):
        return None
    layout, _, order = layout_of(image).partition(";16")
    is_gray = layout == "LA" and image.mode == "RGBA"  # whose four bytes Pillow can decode as RGBA
    is_split = layout in SPLIT and order in OTHER and not is_planar(image)
    if not is_gray and not is_split:
        if is_required:
            raise ValueRangeError(
                f"DATA.VALUE_RANGE cannot be applied to 16 bits per channel in the layout "
                f"{layout}: save the image as RGB or RGBA"
            )
        return None
    other = "RGBA" if is_gray else f"{layout};16{OTHER[order]}"
    with Image.open(image.fp) as second:
        second.seek(image.tell())
        second.tile = [_replace_layout(tile, other) for tile in second.tile]
        second.load()
        turn_upright(second)
    image.load()
    turn_upright(image)
    lower = np.asarray(second)
    upper, lower = (lower[..., ::2], lower[..., 1::2]) if is_gray else (np.asarray(image), lower)
    wide = upper.astype(np.uint16)
    wide <<= 8
    wide |= lower
    return wide


def _replace_layout(tile: tuple, layout: str) -> tuple:
    codec, extents, offset, args = tile
    args = layout if isinstance(args, str) else (layout, *args[1:])
    # Pillow's named tuple, which was a tuple in earlier versions
    replaced = (codec, extents, offset, args)
    return replaced if type(tile) is tuple else type(tile)(*replaced)
