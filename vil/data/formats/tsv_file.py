"""Random access to the rows of a .tsv file.

The byte offsets of the rows are stored in a .lineidx file beside the .tsv. If it is missing and
cannot be written, they are computed each time that the .tsv is opened.
"""

import logging
import mmap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from vil.data.formats.shared_file import SharedFile
from vil.utils.atomic_write import write_aside
from vil.utils.errors import DataError
from vil.utils.plural import plural
from vil.utils.safe_files import path_below

logger = logging.getLogger(__name__)

SCAN_BYTES = 1 << 24  # bytes to read at once when searching for rows
KEY_BYTES = 256  # bytes to read first for the first column of a row


class TsvFile:
    """A .tsv file with TAB-separated columns. Row numbers start at 0.

    Writes the .lineidx file of row offsets if it is missing. Raises DataError if the .tsv is
    missing or empty, or if the .lineidx does not belong to it.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise DataError(f"there is no {path}")
        self.path = path
        self.file = SharedFile(path)
        self.offsets = row_offsets(path)  # (rows + 1,), the last one is the size of the file

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int, limit: int | None = None) -> bytes:
        """Return the bytes of a row without its line end. limit: read at most this many bytes of
        the row. Raises OSError if the file cannot be read."""
        begin, end = self.offsets[number : number + 2].tolist()
        size = end - begin if limit is None else min(limit, end - begin)
        return self.file.read(begin, size).rstrip(b"\r\n")

    def key(self, number: int) -> str:
        """Return the first column of a row without reading a long row completely. Raises OSError if
        the file cannot be read."""
        head = self.row(number, KEY_BYTES)
        if b"\t" not in head:
            head = self.row(number)
        return head.split(b"\t")[0].decode("utf-8", "surrogateescape")

    def labels(self, numbers: Iterable[int], *, before_image: bool) -> Iterator[str]:
        """Yield the label (second column) of each row in `numbers`, without reading image data.

        before_image: whether the rows must also have a third column, the image. Raises DataError if
        a column is missing.
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
    """Return the byte offsets of the rows, followed by the size of the file: (rows + 1,) int64.

    Writes the .lineidx if it is missing. Raises DataError if it does not match the .tsv, or if the
    .tsv is empty.
    """
    size = path.stat().st_size
    if not size:
        raise DataError(f"{path} is empty")
    index = path.with_suffix(".lineidx")
    if index.is_symlink():
        path_below(path.parent, index.name, path)
    if index.is_file():
        offsets = read_integers(index)
        if problem := find_problem(path, offsets, size):
            # Do not rebuild it automatically: that would accept a .tsv from a failed copy.
            raise DataError(
                f"{index} is not the index of {path}: {problem}; "
                f"if {path.name} is complete, delete the index to rebuild it"
            )
        return np.append(offsets, size)
    offsets = find_rows(path)
    with open(path, "rb") as file:
        if b"\t" in file.readline(SCAN_BYTES):  # else it is not a TSV: write nothing
            write_index(index, offsets)
    return np.append(offsets, size)


def read_integers(path: Path) -> np.ndarray:
    """Read an array (lines,) int64 from a file with one integer per line. Raises DataError if a
    line is not an integer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # older numpy only warns, and returns the first values
            return np.fromstring(path.read_bytes(), dtype=np.int64, sep="\n")
    except (ValueError, DeprecationWarning) as error:
        raise DataError(f"{path} must have one integer per line") from error


def find_problem(path: Path, offsets: np.ndarray, size: int) -> str | None:
    """Return why `offsets` cannot be the row offsets of a file, or None if no problem is found.
    Checks the order of the offsets and the position of the last row. size: bytes in the file."""
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
    """Return the byte offsets (rows,) of the lines of a file."""
    starts, base = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while block := file.read(SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            starts.append(ends + (base + 1))
            base += len(block)
    offsets = np.concatenate(starts)
    return offsets[:-1] if offsets[-1] == base else offsets


def write_index(index: Path, offsets: np.ndarray) -> None:
    """Write the row offsets to a file. Logs a warning with its path or, if it cannot be written,
    with the error."""
    try:
        # atomically, because other processes may read it at the same time
        with write_aside(index) as aside, open(aside, "wb") as file:
            offsets.tofile(file, sep="\n")
            file.write(b"\n")
        logger.warning(
            "%s was missing, and was written with %s", index, plural(len(offsets), "row")
        )
    except OSError as error:
        text = "%s is missing and cannot be written (%s): row offsets are in memory only"
        logger.warning(text, index, error.strerror or error)
