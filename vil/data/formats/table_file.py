"""Read the rows of a CSV, TSV or Parquet file as text, with the number of each line."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vil.data import EXTRAS
from vil.utils.errors import DataError
from vil.utils.extras import require_extra
from vil.utils.safe_files import regular_file

DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_LINE = 1 << 20  # bytes
MAX_ROWS_PER_BYTE = 8  # of Parquet; the paths of images differ, so that each takes some bits
MIN_TEXT, MAX_TEXT_PER_BYTE = 2**28, 1000  # bytes of text, which may repeat a long one
BATCH = 10_000  # rows of Parquet that are converted at once


class Rows(NamedTuple):
    """The column names of a table, and an iterator over its rows.

    cells: yields (number of the line or row, list of cells). A cell is a text or, for a list in a
    Parquet file, a list of texts; missing values are "". unit: what the number counts, "line" or
    "row".
    """

    columns: list[str]
    cells: Iterator[tuple[int, list[Any]]]
    unit: str = "line"


def read_rows(path: Path) -> Rows:
    """Open a table in the format of the file's extension, .csv, .tsv or .parquet.

    Raises DataError if the file is missing, invalid or empty. Iterating over the rows may also
    raise DataError.
    """
    try:
        regular_file(path)
    except OSError as error:
        gone = [folder for folder in path.parents if not folder.exists()]
        reason = f"there is no folder {gone[-1]}" if gone else error.strerror or error
        raise DataError(f"the table {path} cannot be read: {reason}") from error
    if path.suffix.lower() == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _read_csv(path)
    if repeated := sorted({name for name in rows.columns if rows.columns.count(name) > 1}):
        raise DataError(f"{path} has several columns with the name {', '.join(repeated)}")
    return rows


def _read_csv(path: Path) -> Rows:
    lines = _read_records(path)
    number, header = next(lines, (0, []))
    if not header:
        raise DataError(
            f'{path} is empty: its first line must name the columns, such as "path,label"'
        )
    columns = [name.strip() for name in header]

    def cells() -> Iterator[tuple[int, list[str]]]:
        for number, record in lines:
            if len(record) != len(columns):
                raise DataError(
                    f"{path}, line {number}: the line has {len(record)} cells, but there are "
                    f"{len(columns)} columns ({', '.join(columns)})"
                )
            yield number, record

    return Rows(columns, cells())


def _read_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the record's last line, cells) for each record. Skips empty lines."""
    reader = csv.reader(_decode(path), delimiter=DELIMITERS[path.suffix.lower()], strict=True)
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
        if record is None:
            return
        if record:
            yield reader.line_num, record


def _decode(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file. Raises DataError, with the line number, for a line that is
    not UTF-8 or has more than MAX_LINE bytes."""
    number = 0
    with open(path, "rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise DataError(f"{path}, line {number}: the line is longer than {MAX_LINE} bytes")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason})") from error


def _read_parquet(path: Path) -> Rows:
    require_extra(EXTRAS[".parquet"], f"the table {path}")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        schema = ParquetFile(path).schema
        leaves = map(schema.column, range(len(schema)))
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        file = ParquetFile(path, read_dictionary=texts)  # repeated texts are in memory once
        columns, rows, size = file.schema_arrow.names, file.metadata.num_rows, path.stat().st_size
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if rows > MAX_ROWS_PER_BYTE * size:  # a run length of equal values takes a few bytes
        raise DataError(f"{path} has {rows} rows in only {size} bytes: write it again")

    def cells() -> Iterator[tuple[int, list[Any]]]:
        number, left = 0, MIN_TEXT + MAX_TEXT_PER_BYTE * size
        try:
            for batch in file.iter_batches(BATCH):
                left -= sum(map(text_size, batch.columns))
                if left < 0:
                    raise DataError(f"{path} repeats long texts in only {size} bytes: shorten them")
                for values in zip(*(column.to_pylist() for column in batch.columns)):
                    number += 1
                    yield number, [_as_cell(value) for value in values]
        except (ArrowException, OSError, ValueError, OverflowError) as error:  # text, dates
            reason = " ".join(str(error).split())
            raise DataError(f"{path}, after row {number}: {reason}") from error

    return Rows(list(columns), cells(), "row")


def text_size(column: Any) -> int:
    """Return the bytes of the texts in an Arrow array, each counted as often as it occurs. Texts
    must be in dictionaries."""
    from pyarrow import compute, types

    if types.is_nested(column.type):
        parts = column.flatten()
        return sum(map(text_size, parts if isinstance(parts, list) else [parts]))
    if not types.is_dictionary(column.type):
        return 0
    # pyrefly: ignore[missing-attribute]  # pyarrow generates the functions of this module
    lengths = compute.binary_length(column.dictionary)
    # pyrefly: ignore[missing-attribute]
    return compute.sum(lengths.take(column.indices)).as_py() or 0


def _as_cell(value: Any) -> str | list[str]:
    return [_as_text(item) for item in value] if isinstance(value, list) else _as_text(value)


def _as_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
