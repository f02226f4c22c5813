"""Open image files as arrays whose rows are read on demand.

.npy files are memory-mapped, and so are .tif files whose pixels are uncompressed and in one piece.
Other .tif files and .zarr files are read in chunks. All .tif and .zarr files need the extra
`stream`. A .png or .jpg file is decoded completely, to 8 bits per channel, and held in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vil.utils.errors import DataError, one_line
from vil.utils.exif import turn_upright, upright_size
from vil.utils.extras import Extra, require_extra
from vil.utils.rgb import WHITE, flatten, has_transparency
from vil.utils.safe_files import regular_file
from vil.utils.wide_pixels import check_layout, is_wide

CHANNELS = (1, 3, 4)  # numbers of channels of images that Pillow reads
MAX_PIXELS = 2**34
PILLOW = (".png", ".jpg", ".jpeg")
TIFF = (".tif", ".tiff")
UNSUPPORTED = ("MINISWHITE", "PALETTE", "CIELAB", "ICCLAB", "ITULAB")  # photometric types of TIFF
PREMULTIPLIED = 1  # extra sample of TIFF: alpha by which the colors are multiplied
SUFFIXES = (*PILLOW, *TIFF, ".npy", ".zarr")


def open_file(
    path: str | Path, channels: int, is_hwc: bool, background: Sequence[int] = WHITE
) -> tuple[Any, bool]:
    """Open an image file. Returns (array, hwc). hwc: True for channels last, False for first.

    channels: number of channels that the model needs. is_hwc: value of `hwc` for .npy and .zarr
    files. It is ignored for other files. background: color (red, green, blue) behind transparent
    pixels of a .png file that is read as gray or RGB, in 0..255. Raises DataError if the file
    cannot be read.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not Path(path).exists():
        raise DataError(f"{path}: there is no such file")
    with _readable(path):
        regular_file(path)
        if suffix in PILLOW:
            array, is_hwc = _open_pillow(Path(path), channels, background), True
        elif suffix in TIFF:
            array, is_hwc = _open_tiff(path)
        elif suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array = _open_zarr(path)
    pixels = np.prod([int(n) for n in array.shape], dtype=float) / channels
    if pixels > MAX_PIXELS:
        raise DataError(f"{path}: the image has {pixels:.3g} pixels, more than {MAX_PIXELS}")
    return array, is_hwc


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Convert any error inside the `with` block to a DataError with a one-line message."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


class PillowRows:
    """An image file, opened by Pillow, as an array (H, W, C) of uint8.

    A PNG file is decoded in the constructor, because its orientation may follow the pixels. Other
    files are decoded when their first rows are read. channels: 1 for gray, 3 for RGB, or 4 for the
    channels of the file, such as RGBA. background: see `open_file`.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, image: Image.Image, channels: int, background: Sequence[int]) -> None:
        self.image, self.background, self.is_upright = image, background, False
        if image.format == "PNG":
            image.load()
        width, height = upright_size(image)
        self.shape = (height, width, channels)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return a range of rows as an array (n, W, C)."""
        if not self.is_upright:
            self.image.load()
            turn_upright(self.image)
            self.is_upright = True
        first, stop, _ = rows.indices(self.shape[0])
        strip = self.image.crop((0, first, self.shape[1], stop))
        channels = self.shape[2]
        if channels == 4:
            strip = strip if len(strip.getbands()) == 4 else strip.convert("RGBA")
        elif strip.mode != "L" or has_transparency(strip):
            strip = flatten(strip, self.background).convert("RGB")
        if channels < 4:
            strip = strip.convert("L" if channels == 1 else "RGB")
        return np.asarray(strip).reshape(stop - first, *self.shape[1:])


def _open_pillow(path: Path, channels: int, background: Sequence[int]) -> PillowRows:
    if channels not in CHANNELS:
        raise DataError(
            f"{path}: this format cannot have {channels} channels; use a .tif, .npy or .zarr file"
        )
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MAX_PIXELS
    try:
        image = Image.open(path)
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    if image.format == "EPS":  # with any suffix: PIL runs it in Ghostscript
        raise DataError(f"{path}: not an image of a known format")
    check_layout(image)
    if image.mode == "F" or image.mode.startswith("I") or is_wide(image):
        raise DataError(
            f"{path}: images with more than 8 bits per channel can be read only from .tif, .npy or "
            ".zarr files"
        )
    has_palette = image.mode in ("P", "PA") and has_transparency(image)
    if channels == 4 and len(image.getbands()) != 4 and not has_palette:
        raise DataError(f"{path} has the mode {image.mode}, but the model takes 4 channels")
    return PillowRows(image, channels, background)


def _open_tiff(path: str | Path) -> tuple[Any, bool]:
    """Open the first image of a TIFF file. Returns the same values as `open_file`."""
    require_extra(Extra("tifffile", "stream"), f"the image {path}")
    import tifffile

    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        axes, page = series.axes, series.keyframe
        _check_complete(path, file, series)
        _check_values(path, page)
        is_mappable = page.is_memmappable and series.dataoffset is not None
    if axes not in ("YX", "YXS", "SYX", "CYX", "QYX", "IYX"):
        raise DataError(f"{path}: its axes are {axes}, expected YX, YXS, SYX or CYX")
    if is_mappable:
        return tifffile.memmap(path, mode="r"), axes in ("YX", "YXS")
    store = tifffile.imread(path, aszarr=True, series=0)
    return open_store(store, f"the tiled or compressed image {path}"), axes in ("YX", "YXS")


def open_store(store: Any, name: str) -> Any:
    """Return the zarr array in a store that `tifffile.imread(..., aszarr=True)` returned. name: the
    name of the image in error messages."""
    require_extra(Extra("zarr", "stream"), name)
    import zarr

    array = zarr.open(store, mode="r")
    if not hasattr(array, "shape"):  # a pyramid, whose first level is the image
        array = array["0"]
    return array


def _check_complete(path: str | Path, file: Any, series: Any) -> None:
    """Raise DataError if the TIFF file is truncated, so that some of its pixels are missing."""
    size = file.filehandle.size
    for page in series.pages:
        page = page.aspage() if page is not None else None
        if page is None:
            continue
        for offset, count in zip(page.dataoffsets, page.databytecounts):
            if offset + count > size:
                raise DataError(
                    f"{path} is truncated: it has {size} bytes, but needs at least {offset + count}"
                )


def _check_values(path: str | Path, page: Any) -> None:
    """Raise DataError if the stored values of a TIFF page are not the pixels of the image, because
    the page is rotated, mirrored or inverted, or has a palette."""
    turn = page.tags.valueof("Orientation", default=1)
    if turn != 1:
        raise DataError(f"{path}: its orientation is {turn}; save it upright, with orientation 1")
    photometric = getattr(page.photometric, "name", "")
    if photometric in UNSUPPORTED or (photometric == "YCBCR" and page.compression.name != "JPEG"):
        raise DataError(
            f"{path}: the photometric type {photometric} is not supported; save the image as gray "
            "(MINISBLACK) or RGB"
        )
    if PREMULTIPLIED in page.extrasamples:
        raise DataError(
            f"{path}: its colors are multiplied with alpha (associated alpha); save the image with "
            "unassociated alpha"
        )


def _open_zarr(path: str | Path) -> Any:
    require_extra(Extra("zarr", "stream"), f"the image {path}")
    import zarr

    array = zarr.open(str(path), mode="r")
    if not hasattr(array, "shape"):
        names = ", ".join(sorted(array.keys())) or "nothing"
        raise DataError(
            f"{path} is a zarr group that contains {names}: give the path of an array in the group"
        )
    return array
