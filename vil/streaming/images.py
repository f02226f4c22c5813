"""Open images whose pixels are read a few rows at a time.

An image is an array (NumPy, torch, zarr, dask or a memory map), a rasterio-like reader, or a file.

Shapes: H W size in pixels, c channels, n rows.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vil.streaming.image_files import open_file, open_store
from vil.streaming.rows import RowSource
from vil.utils.errors import ConfigError, DataError, one_line
from vil.utils.rgb import WHITE

LAYOUTS = ("CHW", "HWC")
HIGHEST = {"bool": 1.0, "uint8": 255.0, "uint16": 65535.0}  # value that becomes 1, by dtype
HIGHEST |= dict.fromkeys(("float16", "bfloat16", "float32", "float64"), 1.0)
TRANSFORMED = 3  # copies of the pixels of a strip while a transform runs
Transform = Callable[[Tensor], Tensor]
ReadRows = Callable[[int, int], Any]


class Pixels:
    """An opened image.

    size: (H, W). channels: c. dtype: name of the dtype, such as "uint8". rows: function of the
    first row and the end row (exclusive) that returns an array (c, n, W), or (n, W, c) if `is_hwc`.
    name: the image's name in error messages.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: str, rows: ReadRows, *, is_hwc: bool, name: str
    ) -> None:
        self.size = tuple(shape[:2] if is_hwc else shape[1:])
        self.channels = shape[2] if is_hwc else shape[0]
        self.dtype, self.rows, self.is_hwc, self.name = dtype, rows, is_hwc, name

    def read(self, first: int, stop: int) -> Tensor:
        """Read rows `first` to `stop`, exclusive, as a tensor (c, n, W) of the image's dtype (int32
        for uint16). Raises DataError if they cannot be read."""
        try:
            rows = self.rows(first, stop)
            tensor = rows if isinstance(rows, Tensor) else as_tensor(np.asarray(rows))
            if tensor.dtype == torch.uint16:  # torch has few operations for it
                tensor = tensor.int()
        except Exception as error:  # readers of files raise anything
            raise DataError(
                f"{self.name}: rows {first} to {stop - 1} cannot be read: {one_line(error)}"
            ) from error
        tensor = tensor.movedim(-1, 0) if self.is_hwc and tensor.ndim == 3 else tensor
        expected = (self.channels, stop - first, self.size[1])
        if tuple(tensor.shape) != expected:
            raise DataError(
                f"{self.name}: rows {first} to {stop - 1} have the shape {tuple(tensor.shape)}, "
                f"expected {expected}"
            )
        return tensor


def as_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor that shares its memory if possible."""
    if array.dtype.byteorder == ">" or any(step < 0 for step in array.strides):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of NumPy or torch, such as "uint16", without its byte order."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype).removeprefix("torch.")


def open_pixels(
    image: Any, layout: str, channels: int, background: Sequence[int] = WHITE
) -> Pixels:
    """Open an image to read its pixels a few rows at a time.

    image: see `vil.stream`. layout: "CHW" or "HWC" for arrays and for .npy and .zarr files.
    channels: number of channels of the model's input. background: see `open_file`. Raises
    ConfigError unless the object is an image with this number of channels, and DataError if a file
    cannot be read.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    name = "the image"
    is_hwc = layout == "HWC"
    if isinstance(image, str | Path):
        name = str(image)
        image, is_hwc = open_file(image, channels, is_hwc, background)
    elif type(image).__module__.startswith("tifffile"):  # a store of `imread(..., aszarr=True)`
        image = open_store(image, name)
    if callable(getattr(image, "read", None)) and hasattr(image, "count"):
        pixels = _open_reader(image, name)
    elif hasattr(image, "shape") and hasattr(image, "__getitem__"):
        pixels = _open_array(image, is_hwc, name)
    else:
        raise ConfigError(
            f"an object of type {type(image).__name__} is not an image: give an array, a reader "
            "with .read(window=), or a path"
        )
    if pixels.channels != channels:
        raise ConfigError(
            f"{name} has {pixels.channels} channels in the layout "
            f"{'HWC' if pixels.is_hwc else 'CHW'}, but the model takes {channels}"
        )
    return pixels


def _open_array(image: Any, is_hwc: bool, name: str) -> Pixels:
    shape, dtype = tuple(image.shape), dtype_name(image.dtype)
    if len(shape) == 2:  # one channel
        shape = (*shape, 1) if is_hwc else (1, *shape)

        def rows(first: int, stop: int) -> Any:
            return image[first:stop][..., None] if is_hwc else image[first:stop][None]
    elif len(shape) == 3:

        def rows(first: int, stop: int) -> Any:
            return image[first:stop] if is_hwc else image[:, first:stop]
    else:
        raise ConfigError(
            f"{name} must have the shape (C, H, W), (H, W, C) or (H, W), got the shape {shape}"
        )
    return Pixels(shape, dtype, rows, is_hwc=is_hwc, name=name)


def _open_reader(image: Any, name: str) -> Pixels:
    """Open an image that a reader provides, such as a rasterio dataset. The reader must have the
    attributes `count`, `height`, `width` and `dtypes`, and the method `read(window=)`."""
    shape = (image.count, image.height, image.width)

    def rows(first: int, stop: int) -> Any:
        return image.read(window=((first, stop), (0, image.width)))

    return Pixels(shape, dtype_name(image.dtypes[0]), rows, is_hwc=False, name=name)


class ImageRows(RowSource):
    """A `RowSource` of an image's pixels, as the input of a model.

    dtype, device: those of the model's parameters. transform: function applied to strips (c, n, W).
    Raises ConfigError if the pixels are not floats and there is no transform, or if a `Normalize`
    has no value range for their dtype.
    """

    def __init__(
        self,
        pixels: Pixels,
        dtype: torch.dtype,
        device: torch.device,
        transform: Transform | None,
    ) -> None:
        super().__init__(*pixels.size, pixels.channels, dtype, device)
        if isinstance(transform, Normalize):
            transform = transform.for_dtype(pixels.dtype)
        self.pixels, self.transform = pixels, transform
        if transform is None and "float" not in pixels.dtype:
            raise ConfigError(
                f"{pixels.name} has values of type {pixels.dtype}, but must have normalized "
                "floats: give transform=, such as vil.streaming.Normalize(mean, std)"
            )

    @property
    def copies(self) -> int:
        """Number of copies of a strip's pixels that are in memory while the strip is read; 0 if the
        strip shares the memory of the image."""
        if self.transform is not None:
            return TRANSFORMED
        is_shared = self.device.type == "cpu" and self.pixels.dtype == str(self.dtype)[6:]
        return 0 if is_shared else 1

    def read_map(self, first: int, stop: int) -> Tensor:
        rows = self.pixels.read(first, stop)  # may share the memory of the user's array
        rows = rows.to(self.device, copy=self.transform is not None)
        if self.transform is not None:
            expected, rows = rows.shape, self.transform(rows)
            if not isinstance(rows, Tensor) or rows.shape != expected:
                raise ConfigError(
                    "`transform` must return a tensor of the same shape as its input, "
                    f"{tuple(expected)}, got {tuple(getattr(rows, 'shape', ()))}"
                )
        return rows.to(self.dtype)[None]


class Normalize:
    """A transform that scales values to 0..1, subtracts the mean and divides by the std.

    mean, std: one number per channel, for values in 0..1. value_range: the values (low, high) that
    are scaled to 0 and 1. Default: the full range of uint8 or uint16, and (0, 1) for floats and
    bool. Values of any other type need a value_range.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        value_range: Sequence[float] = (),
    ) -> None:
        self.mean, self.std = (torch.tensor(x, dtype=torch.float32) for x in (mean, std))
        self.value_range = tuple(value_range)

    def for_dtype(self, dtype: str) -> "Normalize":
        """Return a copy of this transform with a value range. If this transform has none, the copy
        has the default range of `dtype`, such as "uint8". Raises ConfigError if `dtype` is needed
        but has no default range."""
        if not self.value_range and dtype not in HIGHEST:
            raise ConfigError(
                f"values of type {dtype} have no known range: give Normalize a value_range, the "
                "two values that become 0 and 1, such as (0, 65535) for 16-bit images"
            )
        result = copy.copy(self)
        result.value_range = self.value_range or (0.0, HIGHEST[dtype])
        return result

    def __call__(self, strip: Tensor) -> Tensor:
        """Normalize a strip (c, n, W). Returns float32 of the same shape."""
        mean, std = (each.to(strip.device)[:, None, None] for each in (self.mean, self.std))
        low, high = self.for_dtype(dtype_name(strip.dtype)).value_range
        x = strip.to(torch.float32, copy=True)
        if (low, high) != (0.0, 1.0):
            x.sub_(low).div_(high - low)
        return x.sub_(mean).div_(std)

    def __repr__(self) -> str:
        parts = (self.mean.tolist(), self.std.tolist(), self.value_range)
        return f"Normalize({', '.join(map(str, parts))})"
