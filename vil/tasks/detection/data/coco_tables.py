"""Read a file in COCO's format as Python lists and check the fields that are required.

https://cocodataset.org/#format-data
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vil.utils.errors import DataError

FORMAT = (
    "expected COCO's format: images [{id, file_name, width, height}], categories [{id, name}], "
    "annotations [{id, image_id, category_id, bbox [x, y, width, height], iscrowd, segmentation}]"
)
REQUIRED = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "categories": {"id": int, "name": str},
    "annotations": {},
}


def read_tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the lists of REQUIRED. Raises DataError for an invalid file."""
    try:
        # NaN and Infinity are not JSON, but Python's json writes them: read them as None
        content = json.loads(path.read_text("utf-8-sig"), parse_constant=lambda name: None)
    except FileNotFoundError as error:
        raise DataError(f"there is no annotation file {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON, or is truncated: {error}") from error
    for key, fields in REQUIRED.items():
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise DataError(f"{path} has no list {key!r}; {FORMAT}")
        for i, row in enumerate(rows):
            if fault := find_fault(row, fields):
                raise DataError(f"{path}: {key}[{i}] {fault}; {FORMAT}")
    return content


def find_fault(row: object, fields: dict[str, type]) -> str | None:
    """Describe the first invalid field of a row."""
    if not isinstance(row, dict):
        return f"is not an object, but {row!r:.40}"
    for key, field_type in fields.items():
        value = row.get(key)
        if not isinstance(value, field_type) or isinstance(value, bool):
            return f"has {key} {value!r:.40}" if key in row else f"has no {key!r}"
        if key in ("width", "height") and not 0 < value < 1 << 31:
            return f"has {key} {value}"
        if key == "id" and not -(1 << 63) <= value < 1 << 63:
            return "has an id of more than 64 bits"
        try:
            os.fsencode(value) if key == "file_name" else str(value).encode()
        except UnicodeEncodeError:
            return f"has a {key} that is not text: {value!a:.40}"
    return None


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector, which takes 20 of 25 s when reading COCO's file."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
