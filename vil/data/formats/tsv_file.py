"""One .tsv file and the offsets of its rows, which stand in the .lineidx beside it."""

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

BLOCK = 1 << 24  # bytes looked through at a time
PART = 1 << 20  # offsets written at a time
HEAD = 256  # bytes read at first of a row whose first column is wanted
REMEDY = "delete it to have it made anew"


class TsvFile:
    """Rows of TAB-separated columns, by number from 0. One buffer of 8 bytes per row is kept.

    A missing .lineidx is made. DataError for a file that is missing, empty or unlike its .lineidx.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise DataError(f"there is no {path}")
        self.path = path
        self.file = SharedFile(path)
        self.offsets = row_offsets(path)  # (rows + 1,): the last is the end of the file

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> bytes:
        """A whole row, without its line end. OSError."""
        begin, end = self.offsets[number : number + 2].tolist()
        return self.file.read(begin, end - begin).rstrip(b"\r\n")

    def key(self, number: int) -> str:
        """The first column of a row; of a long row only the beginning is read. OSError."""
        begin, end = self.offsets[number : number + 2].tolist()
        size = HEAD
        while b"\t" not in (head := self.file.read(begin, min(size, end - begin))):
            if size >= end - begin:
                break
            size *= 4
        return head.split(b"\t")[0].rstrip(b"\r\n").decode("utf-8", "surrogateescape")

    def labels(self, numbers: Iterable[int], *, before_image: bool) -> Iterator[str]:
        """The second column of rows, which is not the last where that one is the image.

        The file is mapped, so that the pages of the images are not even read. DataError.
        """
        with (
            open(self.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            for number in numbers:
                begin, end = self.offsets[number : number + 2].tolist()
                first = text.find(b"\t", begin, end)
                second = text.find(b"\t", first + 1, end)
                if first < 0 or (second < 0 and before_image):
                    needed = "key, label and image" if before_image else "key and label"
                    raise DataError(
                        f"{self.path}, line {number + 1}: no label; expected the columns {needed}"
                    )
                label = text[first + 1 : end if second < 0 else second]
                yield label.decode("utf-8", "surrogateescape").rstrip("\r\n")


def row_offsets(path: Path) -> np.ndarray:
    """Where the rows begin, and the size of the file."""
    size = path.stat().st_size
    if not size:
        raise DataError(f"{path} is empty")
    index = path.with_suffix(".lineidx")
    if index.is_file():
        offsets = read_integers(index)
        refuse_stale(path, index, offsets, size)
    else:
        offsets = find_rows(path)
        if has_columns(path):  # else it is no TSV, and what lies beside it is none of our business
            write_index(index, offsets)
    return np.append(offsets, size)


def read_integers(path: Path) -> np.ndarray:
    """A text file with one integer per line, without a Python object per line. DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # older numpy only warns, and gives what it could read
            return np.fromstring(path.read_bytes(), dtype=np.int64, sep="\n")
    except (ValueError, DeprecationWarning) as error:
        raise DataError(f"{path} must have one integer per line") from error


def refuse_stale(path: Path, index: Path, offsets: np.ndarray, size: int) -> None:
    """DataError when rows do not begin, or the last one does not end, where the index says.

    It is not made anew: a file that was cut by a broken copy would pass for a whole one.
    """
    problem = None
    if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
        problem = "it does not rise from 0"
    elif offsets[-1] >= size:
        problem = f"its last row begins at {offsets[-1]} of {size} bytes"
    elif not is_last_row(path, int(offsets[-1])):
        problem = f"its last row, at byte {offsets[-1]}, is not the last line of the file"
    if problem:
        raise DataError(f"{index} is not the index of {path}: {problem}; {REMEDY}")


def is_last_row(path: Path, offset: int) -> bool:
    """Whether exactly one line, the last, begins at offset."""
    with open(path, "rb") as file:
        file.seek(max(offset - 1, 0))
        begins = offset == 0 or file.read(1) == b"\n"
        file.readline()
        return begins and not file.read(1)


def has_columns(path: Path) -> bool:
    """Whether there is a TAB in the first line, of which only a beginning is looked at."""
    with open(path, "rb") as file:
        return b"\t" in file.readline(BLOCK)


def find_rows(path: Path) -> np.ndarray:
    """Offsets (rows,) of the lines of a file, blockwise."""
    found, base = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            found.append(ends + (base + 1))
            base += len(block)
    offsets = np.concatenate(found)
    return offsets[:-1] if offsets[-1] == base else offsets


def write_index(index: Path, offsets: np.ndarray) -> None:
    """Beside the file at one stroke, since other processes may be reading or writing it too.

    Where nothing can be written a message says so, and the offsets live in this process only.
    """
    aside = index.with_name(f".{index.name}.{uuid.uuid4().hex}")
    try:
        with open(aside, "w", encoding="ascii") as file:
            for first in range(0, len(offsets), PART):
                part = offsets[first : first + PART].tolist()
                file.write("".join(f"{offset}\n" for offset in part))
        os.replace(aside, index)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        logger.warning(
            "%s is not there and cannot be written: made for this run (%s)", index, error
        )
    else:
        logger.warning("%s was not there: made from %d rows", index, len(offsets))
