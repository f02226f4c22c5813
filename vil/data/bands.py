"""Read images with 2 channels or 4 to 16 channels (bands), and convert them to RGB for display.

PIL has no image type with an arbitrary number of bands, so these images are tensors. Images with
one or three channels are PIL images in RGB, see `vil.data.image.read_image`.

Shapes: C channels, H W image size.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torchvision.tv_tensors import Image as TensorImage

from vil.utils.rgb import ValueRangeError, kind_of, scale

PIL_CHANNELS = (1, 3)  # numbers of channels that are read as 8-bit RGB by PIL
NPY = b"\x93NUMPY"  # the first bytes of an .npy file


class BandImage(TensorImage):
    """An image tensor (C, H, W) with the attributes mode, width and height of a PIL image. Values
    are uint8, or float32 in 0..1. largest: for an image of 16 bits, its largest value before the
    conversion; otherwise None."""

    largest: int | None = None

    @property
    def mode(self) -> str:  # pyrefly: ignore[bad-override]  # PIL's, not Tensor.mode
        return f"{len(self)} bands of {self.dtype}"

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def height(self) -> int:
        return self.shape[-2]

    def tobytes(self) -> bytes:
        return self.numpy().tobytes()


def is_npy(source: str | Path | BinaryIO) -> bool:
    """Return whether a file starts with the signature of .npy files. source: a path, or an open
    binary file, whose position is restored."""
    if isinstance(source, str | Path):
        with open(source, "rb") as file:
            return file.read(len(NPY)) == NPY
    start = source.read(len(NPY))
    source.seek(-len(start), io.SEEK_CUR)
    return start == NPY


def read_npy(
    source: str | Path | BinaryIO, channels: int, value_range: Sequence[float]
) -> BandImage:
    """Read an image from an .npy file that contains an array (H, W, C), or (H, W) for one channel.

    channels, value_range: see `to_bands`. Raises ValueRangeError for another shape, for too many
    pixels, and for values that `to_bands` cannot convert.
    """
    array = np.load(source, allow_pickle=False)
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or not array.size:
        raise ValueRangeError(
            f"an .npy image must be a nonempty array (H, W) or (H, W, C), not one of shape "
            f"{array.shape}"
        )
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and array.shape[0] * array.shape[1] > limit:
        size = f"{array.shape[1]} x {array.shape[0]} pixels"
        raise ValueRangeError(f"the image has {size}, more than PIL's limit of {limit}")
    return to_bands(array, channels, value_range, f"(H, W, C) = {array.shape}")


def from_pages(
    pages: Sequence[np.ndarray], channels: int, value_range: Sequence[float], mode: str
) -> BandImage:
    """Convert the pages of an image file to a BandImage.

    pages: one array (H, W) or (H, W, C), or several arrays (H, W), one per band. channels,
    value_range: see `to_bands`. mode: PIL mode of the first page, for error messages. Raises
    ValueRangeError if several pages differ in size or have more than one channel, or if `to_bands`
    cannot convert them.
    """
    if len(pages) == 1:
        pixels = pages[0][..., None] if pages[0].ndim == 2 else pages[0]
        return to_bands(pixels, channels, value_range, f"mode {mode}")
    if len({page.shape for page in pages}) > 1 or pages[0].ndim != 2:
        raise ValueRangeError(
            f"the {len(pages)} pages of the file differ in size, or have several channels: save "
            "each channel as one page, with the same size for all pages"
        )
    return to_bands(np.stack(pages, -1), channels, value_range, "pages of a file")


def to_bands(
    array: np.ndarray, channels: int, value_range: Sequence[float], source: str
) -> BandImage:
    """Convert an array (H, W, C) of numbers or bools to a BandImage.

    uint8 values are not changed, and bools become 0 and 255. Other values are scaled from
    value_range (low, high) to float32 in 0..1, and NaN and Inf become 0. If value_range is empty,
    the range is 0..65535 for uint16 and 0..1 for floats.

    source: description of the array for error messages. Raises ValueRangeError if C differs from
    `channels`, if the dtype is not numeric, or if no value is finite. If value_range is empty, also
    raises it for values outside of the default range, and for integers other than uint8 and uint16.
    """
    if array.shape[-1] != channels:
        raise ValueRangeError(
            f"the image has {array.shape[-1]} channels ({source}), but INPUT.CHANNELS is {channels}"
        )
    largest = int(array.max()) if array.dtype == np.uint16 else None
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    kind = kind_of(array.dtype)
    if array.dtype != np.uint8:
        array = scale(array, kind, value_range).clip(0, 1).astype(np.float32)
    tensor = torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))
    image = tensor.as_subclass(BandImage)
    image.largest = largest
    return image


def make_bands(pixels: np.ndarray) -> BandImage:
    """Convert pixels (H, W, C) uint8 to a BandImage (C, H, W)."""
    return to_bands(pixels, pixels.shape[-1], (), "an array")


def rgb_channels(image: torch.Tensor) -> torch.Tensor:
    """Select three channels (3, H, W) of an image (C, H, W) for display as RGB. These are the first
    three channels. If C is 1 or 2, the first channel is repeated three times."""
    return image[:3] if len(image) > 2 else image[:1].expand(3, -1, -1)


def to_display(image: Image.Image | torch.Tensor) -> Image.Image:
    """Convert an image to PIL RGB for display. For a BandImage with more than three channels, the
    first three are displayed. If it has two channels, the first is displayed in gray."""
    if not isinstance(image, torch.Tensor):
        return image.convert("RGB")
    bands = rgb_channels(image)
    if bands.is_floating_point():
        bands = (bands * 255).round()
    return Image.fromarray(bands.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())
