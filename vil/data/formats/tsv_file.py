"""A .tsv file, and the offsets of its rows in the .lineidx file beside it."""

import logging
import mmap
import os
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from vil.data.formats.shared_file import SharedFile
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)

SCAN_BYTES = 1 << 24  # read at a time when rows are searched
KEY_BYTES = 256  # read first to find the first column of a row


class TsvFile:
    """Rows of TAB-separated columns, by number from 0. Uses 8 bytes of memory per row. A missing
    .lineidx is written. Raises DataError for a missing or empty file, or another .lineidx."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise DataError(f"there is no {path}")
        self.path = path
        self.file = SharedFile(path)
        self.offsets = row_offsets(path)  # (rows + 1,), the last one is the size of the file

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int, limit: int | None = None) -> bytes:
        """A row without its line end, at most the first `limit` bytes. Raises OSError."""
        begin, end = self.offsets[number : number + 2].tolist()
        size = end - begin if limit is None else min(limit, end - begin)
        return self.file.read(begin, size).rstrip(b"\r\n")

    def key(self, number: int) -> str:
        """The first column of a row, if possible without reading all of it. Raises OSError."""
        head = self.row(number, KEY_BYTES)
        if b"\t" not in head:
            head = self.row(number)
        return head.split(b"\t")[0].decode("utf-8", "surrogateescape")

    def labels(self, numbers: Iterable[int], *, before_image: bool) -> Iterator[str]:
        """Yield the second column of rows. before_image: a third column must follow.

        The file is memory-mapped, so that the pages of the images are not read. Raises DataError.
        """
        with (
            open(self.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text,
        ):
            for number in numbers:
                begin, end = self.offsets[number : number + 2].tolist()
                first = text.find(b"\t", begin, end)
                second = text.find(b"\t", first + 1, end)
                if first < 0 or (second < 0 and before_image):
                    columns = "key, label and image" if before_image else "key and label"
                    problem = f"no label; expected the columns {columns}"
                    raise DataError(f"{self.path}, line {number + 1}: {problem}")
                label = text[first + 1 : end if second < 0 else second]
                yield label.decode("utf-8", "surrogateescape").rstrip("\r\n")


def row_offsets(path: Path) -> np.ndarray:
    """The offsets of the rows, and the size of the file."""
    size = path.stat().st_size
    if not size:
        raise DataError(f"{path} is empty")
    index = path.with_suffix(".lineidx")
    if index.is_file():
        offsets = read_integers(index)
        if problem := find_problem(path, offsets, size):
            # Not replaced automatically: a file truncated by a failed copy would then be accepted.
            raise DataError(
                f"{index} is not the index of {path}: {problem}; "
                "if the file is complete, delete the index to rebuild it"
            )
    else:
        offsets = find_rows(path)
        with open(path, "rb") as file:
            if b"\t" in file.readline(SCAN_BYTES):  # else it is no TSV: write nothing beside it
                write_index(index, offsets)
    return np.append(offsets, size)


def read_integers(path: Path) -> np.ndarray:
    """Read one integer per line, without a Python object per line. Raises DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # older numpy only warns and returns a part
            return np.fromstring(path.read_bytes(), dtype=np.int64, sep="\n")
    except (ValueError, DeprecationWarning) as error:
        raise DataError(f"{path} must have one integer per line") from error


def find_problem(path: Path, offsets: np.ndarray, size: int) -> str | None:
    """Why these are not the offsets of the rows of a file of `size` bytes; None if they can be."""
    if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
        return "its offsets do not increase from 0"
    last = int(offsets[-1])
    if last >= size:
        return f"its last row starts at {last} of {size} bytes"
    with open(path, "rb") as file:
        file.seek(max(last - 1, 0))
        follows_line = last == 0 or file.read(1) == b"\n"
        file.readline()
        if follows_line and not file.read(1):
            return None
    return f"its last row, at byte {last}, is not the last line of the file"


def find_rows(path: Path) -> np.ndarray:
    """Offsets (rows,) of the lines of a file."""
    starts, base = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            starts.append(ends + (base + 1))
            base += len(block)
    offsets = np.concatenate(starts)
    return offsets[:-1] if offsets[-1] == base else offsets


def write_index(index: Path, offsets: np.ndarray) -> None:
    """Write the index atomically, as other processes may use it at the same time. Warns if it
    cannot be written: the offsets are then in memory only."""
    temporary = index.with_name(f".{index.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            offsets.tofile(file, sep="\n")
            file.write(b"\n")
        os.replace(temporary, index)
        logger.warning("%s was missing: written with %d rows", index, len(offsets))
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        text = "%s is missing and cannot be written: row offsets are kept in memory (%s)"
        logger.warning(text, index, error)
