"""Write maps to .npy, .zarr or tiled BigTIFF files.

A map is first written row by row to a memory-mapped .npy file. When it is complete, it is converted
to the requested format.

Shapes: d channels, X Y rows and columns of a map.
"""

import io
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vil.streaming.plan import format_bytes
from vil.utils.errors import ConfigError, SaveError, os_error_as
from vil.utils.extras import Extra, require_extra
from vil.utils.output_paths import replacing

TIFF = (".tif", ".tiff")
ZARR_FILES = ("zarr.json", ".zarray")  # of an array's folder, by versions of the format
ENDINGS = (".npy", ".zarr", *TIFF)
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


def check_map_file(path: Path) -> None:
    """Check that a map can be saved to a path. Raises ConfigError for an unknown extension, and for
    a .zarr path that cannot be written. Raises DataError if a required package is missing."""
    if path.suffix.lower() == ".npy":
        return
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--save {path}: expected a name that ends in {', '.join(ENDINGS)}")
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


def convert_map(source: Path, target: Path) -> None:
    """Write the map (d, X, Y) in a complete .npy file to `target`, in the format of its extension.

    A .tif file stores the map as (X, Y, d). The target is replaced only when the new file is
    complete. Raises ConversionError if the target cannot be written.
    """
    suffix = target.suffix.lower()
    try:
        if suffix == ".zarr":
            _write_zarr(np.load(source, mmap_mode="r"), target)
            return
        with replacing(target, "--save") as aside:
            if suffix == ".npy":
                shutil.copyfile(source, aside)
            else:
                _write_tiff(np.load(source, mmap_mode="r"), aside)
    except (OSError, ConfigError) as error:
        raise ConversionError(
            f"{target} cannot be written ({error}). The complete map is in {source}"
        ) from error


def _write_zarr(array: np.ndarray, target: Path) -> None:
    import zarr

    aside = target.with_name(f".{target.name}.new")
    chunks = (array.shape[0], min(TILE, array.shape[1]), min(TILE, array.shape[2]))
    options = dict(shape=array.shape, chunks=chunks, dtype=array.dtype)
    try:
        store = zarr.open(str(aside), mode="w", **options)
        for first in range(0, array.shape[1], TILE):
            store[:, first : first + TILE] = array[:, first : first + TILE]
        if target.exists():
            shutil.rmtree(target)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tiff(array: np.ndarray, target: Path) -> None:
    import tifffile

    tifffile.imwrite(
        target,
        _tiles(array),
        shape=(*array.shape[1:], array.shape[0]),
        dtype=array.dtype,
        tile=(TILE, TILE),
        photometric="minisblack",
        planarconfig="contig",
        bigtiff=True,
    )


def _tiles(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the tiles (TILE, TILE, d) of a map (d, X, Y), row by row, padded with zeros."""
    channels, rows, cols = array.shape
    for row in range(0, rows, TILE):
        for col in range(0, cols, TILE):
            part = array[:, row : row + TILE, col : col + TILE]
            tile = np.zeros((TILE, TILE, channels), array.dtype)
            tile[: part.shape[1], : part.shape[2]] = part.transpose(1, 2, 0)
            yield tile
