"""A file in COCO's format as Python's lists, once it is sure that they are such a file's.

https://cocodataset.org/#format-data
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vil.utils.errors import DataError

FORMAT = (
    "expected COCO's format: images [{id, file_name, width, height}], categories [{id, name}], "
    "annotations [{id, image_id, category_id, bbox [x, y, width, height], iscrowd, segmentation}]"
)
NEEDED = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "categories": {"id": int, "name": str},
    "annotations": {},
}


def tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The three lists of the file, whose rows have what is needed."""
    try:
        # None for NaN and Infinity, which are no JSON, but which Python writes
        content = json.loads(path.read_text("utf-8-sig"), parse_constant=lambda name: None)
    except FileNotFoundError as error:
        raise DataError(f"there is no annotation file {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON, or was cut off: {error}") from error
    for key, needed in NEEDED.items():
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise DataError(f"{path} has no list {key!r}; {FORMAT}")
        for at, row in enumerate(rows):
            if fault := fault_of(row, needed):
                raise DataError(f"{path}: {key}[{at}] {fault}; {FORMAT}")
    return content


def fault_of(row: object, needed: dict[str, type]) -> str | None:
    """What a row lacks."""
    if not isinstance(row, dict):
        return f"is not an object, but {row!r:.40}"
    for key, kind in needed.items():
        value = row.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"has {key} {value!r:.40}" if key in row else f"has no {key!r}"
        if key in ("width", "height") and not 0 < value < 1 << 31:
            return f"has {key} {value}"
    return None


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the collector of cycles, of which JSON has none: it walks over all that is read again
    and again, 20 s of the 25 that COCO's file took."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
