"""Convert images of any mode to 8-bit RGB."""

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)

FULL_RANGE = {"16-bit": (0.0, 65535.0), "float": (0.0, 1.0)}
WHITE = (255, 255, 255)  # default background of transparent pixels
LARGEST = "largest value"  # key in the `info` of an image
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
MAX_VALUES = 2**20  # values that are converted to float64 at a time
FEW_VALUES = 1 / 8  # of a range: a smaller maximum suggests another range


class ValueRangeError(ValueError):
    """Error for an image whose range of values is unknown, or whose array has an unusable shape,
    type or number of channels."""


def to_rgb(
    image: Image.Image,
    value_range: Sequence[float] = (),
    background: Sequence[int] = WHITE,
    wide: np.ndarray | None = None,
) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB.

    value_range: for an image with more than 8 bits, the values (low, high) that become 0 and 255.
    The default is 0..65535 for 16 bits and 0..1 for floats, with a warning. background: color (red,
    green, blue) behind transparent pixels, in 0..255. wide: pixels (H, W, C) uint16 of a color
    image with 16 bits per channel, see `read_wide`.

    Raises ValueRangeError if no pixel is finite. Without `value_range`, also raises it for 32-bit
    integers and for values outside of the default range. For 16 bits, the `info` of the result has
    the largest value before the conversion under the key LARGEST.
    """
    if wide is None and image.mode != "F" and not image.mode.startswith("I"):
        return flatten(image, background).convert("RGB")
    pixels = np.asarray(image)[..., None] if wide is None else wide
    # a PNG has 16 bits at most, also in mode I
    is_16_bit = wide is not None or ";16" in image.mode
    is_16_bit |= image.mode == "I" and image.format == "PNG"
    kind = "float" if image.mode == "F" else "16-bit" if is_16_bit else "32-bit"
    alpha = None
    if (key := image.info.get("transparency")) is not None:
        alpha = np.where((pixels == key).all(-1), 0, 255).astype(np.uint8)
    elif image.mode == "RGBA":
        alpha, pixels = (pixels[..., -1] >> 8).astype(np.uint8), pixels[..., :-1]
    limits = finite_limits(pixels)
    value_range = value_range or default_range(kind, *limits)
    scaled = np.empty(pixels.shape, np.uint8)
    rows = max(1, MAX_VALUES // pixels[0].size)
    for first in range(0, len(pixels), rows):
        strip = slice(first, first + rows)
        # 256 equal steps: 16-bit values keep their upper 8 bits
        scaled[strip] = (scale_to(pixels[strip], value_range) * 256).clip(0, 255)
    mode = {1: "L", 3: "RGB", 4: "CMYK"}[scaled.shape[-1]]
    bands = [Image.fromarray(band) for band in np.moveaxis(scaled, -1, 0)]
    result = Image.merge(mode, bands).convert("RGB")
    if alpha is not None:
        result.putalpha(Image.fromarray(alpha))
        result = flatten(result, background).convert("RGB")
    if is_16_bit:
        result.info[LARGEST] = int(pixels.max())
    return result


def has_transparency(image: Image.Image) -> bool:
    """Return whether an image has an alpha channel or a transparent color."""
    return image.mode in ALPHA_MODES or "transparency" in image.info


def flatten(image: Image.Image, background: Sequence[int]) -> Image.Image:
    """Composite an image of 8 bits per channel on a background color (red, green, blue), in 0..255.
    Returns an image without alpha or a transparent color as it is."""
    if not has_transparency(image):
        return image
    rgba = image.convert("RGBA")
    if rgba.getchannel("A").getextrema()[0] == 255:
        return rgba
    canvas = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(canvas, rgba)


def kind_of(dtype: str | np.dtype) -> str:
    """Return the type of an image's values as text, such as "16-bit", for `default_range`. dtype: a
    NumPy dtype, or its name. Raises ValueRangeError if the dtype is not numeric."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "uif":
        raise ValueRangeError(f"an image must have numeric values, not the type {dtype}")
    if dtype.kind == "f":
        return "float"
    sign = "signed " if dtype.kind == "i" and dtype.itemsize == 2 else ""
    return f"{sign}{8 * dtype.itemsize}-bit"


def scale(pixels: np.ndarray, kind: str, value_range: Sequence[float]) -> np.ndarray:
    """Scale numbers so that value_range (low, high) becomes 0..1, and return them as float64.

    Numbers outside of the range are not clipped. NaN and Inf become 0. An empty value_range selects
    the default range of `kind`, see `default_range`. Raises ValueRangeError if no value is finite.
    """
    limits = finite_limits(pixels)
    return scale_to(pixels, value_range or default_range(kind, *limits))


def scale_to(pixels: np.ndarray, value_range: Sequence[float]) -> np.ndarray:
    """Scale numbers so that value_range (low, high) becomes 0..1, see `scale`."""
    low, high = value_range
    real = np.isfinite(pixels)
    return (np.where(real, pixels, low).astype(np.float64) - low) / (high - low)


def finite_limits(pixels: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value. Raises ValueRangeError if there is none."""
    values = pixels[np.isfinite(pixels)]
    if not values.size:
        raise ValueRangeError("no pixel has a finite value")
    return float(values.min()), float(values.max())


def default_range(kind: str, least: float, most: float) -> tuple[float, float]:
    """Return the default value range (low, high) of images whose values are of type `kind`.

    Only "16-bit" and "float" have a default range. Raises ValueRangeError for any other type, and
    if the image's smallest value `least` or largest value `most` is outside of the range.
    """
    if kind not in FULL_RANGE:
        raise ValueRangeError(
            f"images of {kind} integers have no default value range: set DATA.VALUE_RANGE to "
            "[low, high]"
        )
    low, high = FULL_RANGE[kind]
    if least < low or most > high:
        text = f"values from {least:g} to {most:g} are outside of {low:g} to {high:g}"
        raise ValueRangeError(f"{text}: set DATA.VALUE_RANGE to [low, high]")
    _warn(kind, bool(0 < most < FEW_VALUES * high))
    return low, high


@cache
def _warn(kind: str, is_dark: bool) -> None:
    """Warn that an image is read with the default value range of its type.

    Warns once per process for the same arguments. kind: type of the values, a key of FULL_RANGE.
    is_dark: whether the image uses only a small part of the range.
    """
    text = "%s images are read with the value range %g to %g; set DATA.VALUE_RANGE to change it"
    if is_dark:
        text += " (some images use only a small part of this range, and become dark)"
    log.warning(text, kind, *FULL_RANGE[kind])
