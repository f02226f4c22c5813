"""Write maps to .npy, .zarr or tiled BigTIFF files, and maps of classes also to .png files.

A map is first written row by row to a memory-mapped .npy file. When it is complete, it is converted
to the requested format.

Shapes: d channels, X Y rows and columns of a map. A map of classes is (X, Y), of an integer dtype.
"""

import io
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vil.streaming.plan import format_bytes
from vil.utils.errors import ConfigError, SaveError, os_error_as
from vil.utils.extras import Extra, require_extra
from vil.utils.output_paths import replacing

TIFF = (".tif", ".tiff")
ZARR_FILES = ("zarr.json", ".zarray")  # of an array's folder, by versions of the format
ENDINGS = (".npy", ".zarr", *TIFF)
CLASS_ENDINGS = (".png", *ENDINGS)
PALETTE_SIZE = 256  # colors at most
TILE = 256  # side of a tile of a TIFF file and of a zarr chunk, in cells


class ConversionError(SaveError):
    """Error for a map that cannot be written in the requested format. The complete map is still in
    a .npy file, which the message names. The caller must keep this file."""


def create_map(file: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that is memory-mapped from a .npy file. Creates the file if it is missing.

    The disk space is allocated immediately. Raises SaveError if the disk is full or the file cannot
    be opened.
    """
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    size = header.tell() + math.prod(shape) * dtype.itemsize
    allocate(file, size, header.getvalue())
    with os_error_as(SaveError, f"{file}"):
        return np.lib.format.open_memmap(file, "r+")


def release_pages(array: object) -> None:
    """Take the pages of an array that is memory-mapped from a file out of this process's memory.
    The file keeps them. Does nothing for other arrays."""
    mapped = getattr(array, "_mmap", None)  # of np.memmap
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def allocate(file: Path, size: int, start: bytes = b"") -> None:
    """Create or extend a file to `size` bytes, and allocate its disk space where the system can.

    start: bytes to write to the start of the file. Raises SaveError if the disk is full or the file
    cannot be opened.
    """
    with (
        os_error_as(SaveError, f"{file}: cannot allocate {format_bytes(size)} on disk"),
        open(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "rb+", buffering=0) as opened,
    ):
        opened.write(start)
        if os.fstat(opened.fileno()).st_size >= size:
            return
        # a later write to a mapped file on a full disk would kill the process
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(opened.fileno(), 0, size)
        else:
            opened.truncate(size)


def check_map_file(path: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Check that a map can be saved to a path. endings: the allowed extensions. Raises ConfigError
    for another extension, and for a .zarr path that cannot be written. Raises DataError if a
    required package is missing."""
    if path.suffix.lower() not in endings:
        raise ConfigError(f"--save {path}: expected a name that ends in {', '.join(endings)}")
    if path.suffix.lower() in (".npy", ".png"):
        return
    if path.suffix.lower() == ".zarr":
        _check_zarr(path)
    module = "zarr" if path.suffix.lower() == ".zarr" else "tifffile"
    require_extra(Extra(module, "stream"), f"the output {path}")


def _check_zarr(path: Path) -> None:
    """Raise ConfigError if the zarr array `path` cannot be written, because the parent folder does
    not exist or is not writable, or because `path` exists and is not a zarr array."""
    parent = path.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"--save {path}: there is no folder {path.parent}")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"--save {path}: no permission to write to {path.parent}")
    if path.exists() and not any((path / name).is_file() for name in ZARR_FILES):
        raise ConfigError(
            f"--save {path}: this path exists and is not a zarr array, so it cannot be replaced"
        )


def convert_map(source: Path, target: Path, palette: np.ndarray | None = None) -> None:
    """Write the map in a complete .npy file to `target`, in the format of its extension.

    A .tif file stores a map (d, X, Y) as (X, Y, d), and compresses a map of classes (X, Y).
    palette (K, 3): colors of K classes, for .tif and .png files of a map of uint8. The target is
    replaced only when the new file is complete. Raises ConversionError if the target cannot be
    written.
    """
    suffix = target.suffix.lower()
    try:
        if suffix == ".zarr":
            _write_zarr(np.load(source, mmap_mode="r"), target)
            return
        with replacing(target, "--save") as aside:
            if suffix == ".npy":
                shutil.copyfile(source, aside)
            elif suffix == ".png":
                _write_png(np.load(source, mmap_mode="r"), aside, palette)
            else:
                _write_tiff(np.load(source, mmap_mode="r"), aside, palette)
    except (OSError, ConfigError) as error:
        raise ConversionError(
            f"{target} cannot be written ({error}). The complete map is in {source}"
        ) from error


def _write_zarr(array: np.ndarray, target: Path) -> None:
    import zarr

    aside = target.with_name(f".{target.name}.new")
    rows, cols = array.shape[-2:]
    chunks = (*array.shape[:-2], min(TILE, rows), min(TILE, cols))
    options = dict(shape=array.shape, chunks=chunks, dtype=array.dtype)
    try:
        store = zarr.open(str(aside), mode="w", **options)
        for first in range(0, rows, TILE):
            store[..., first : first + TILE, :] = array[..., first : first + TILE, :]
        if target.exists():
            shutil.rmtree(target)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tiff(array: np.ndarray, target: Path, palette: np.ndarray | None) -> None:
    import tifffile

    options = dict(photometric="minisblack", planarconfig="contig")
    if array.ndim == 2:
        options = dict(photometric="minisblack", compression="zlib")
        if array.dtype == np.uint8 and palette is not None:
            colors = np.zeros((3, PALETTE_SIZE), np.uint16)
            colors[:, : len(palette)] = palette.T.astype(np.uint16) * 257  # from 8 to 16 bits
            options |= dict(photometric="palette", colormap=colors)
    tifffile.imwrite(
        target,
        _tiles(array),
        shape=(*array.shape[-2:], *array.shape[:-2]),
        dtype=array.dtype,
        tile=(TILE, TILE),
        bigtiff=True,
        **options,
    )


def _write_png(array: np.ndarray, target: Path, palette: np.ndarray | None) -> None:
    """Write a map of classes: indices of a palette if its dtype is uint8, else 16-bit gray."""
    image = Image.fromarray(array)
    if array.dtype == np.uint8 and palette is not None:
        image.putpalette(palette.tobytes())
    image.save(target)


def _tiles(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tiles (TILE, TILE, d) of a map (d, X, Y), or (TILE, TILE) of a map (X, Y), row by
    row, padded with zeros."""
    *channels, rows, cols = array.shape
    for row in range(0, rows, TILE):
        for col in range(0, cols, TILE):
            part = np.moveaxis(array[..., row : row + TILE, col : col + TILE], (-2, -1), (0, 1))
            tile = np.zeros((TILE, TILE, *channels), array.dtype)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile
