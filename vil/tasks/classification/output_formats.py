"""What pictures show, as text: a table for people, JSON and CSV for programs.

Every row of FORMATS takes predictions and the names of the classes and gives the text piece by
piece: JSON and CSV of a million pictures need no memory.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COLUMNS = ("file", "rank", "class", "index", "probability", "error")


class Prediction(NamedTuple):
    """What a picture shows: (class number, probability), the most probable first, or an error."""

    file: str
    classes: list[tuple[int, float]]
    error: str = ""


def as_table(shown: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """A line per class, in columns, all at once: their widths are known at the end."""
    rows = [("file", "class", "probability")]
    for file, classes, error in shown:
        rows += [(file, names[index], f"{share:11.4f}") for index, share in classes]
        rows += [(file, "-", f"cannot be read: {error}")] if error else []
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    yield from (f"{file:{wide[0]}}  {name:{wide[1]}}  {share}\n" for file, name, share in rows)


def as_json(shown: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """An array, one picture per line."""
    before = "[\n"
    for file, classes, error in shown:
        ranked = [
            {"class": names[index], "index": index, "probability": share}
            for index, share in classes
        ]
        record = {"file": file, "classes": ranked} | ({"error": error} if error else {})
        yield before + json.dumps(record)
        before = ",\n"
    yield "\n]\n"


def as_csv(shown: Iterable[Prediction], names: list[str]) -> Iterator[str]:
    """A header, then a line per class; of a picture that cannot be read the file and the error."""
    yield _csv(COLUMNS)
    for file, classes, error in shown:
        for rank, (index, share) in enumerate(classes, start=1):
            yield _csv((file, rank, names[index], index, share, ""))
        if error:
            yield _csv((file, "", "", "", "", error))


def _csv(cells: Iterable) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
