"""Write JSON without NaN and infinity, which Python's json accepts but other parsers reject. Read
JSON files that may be missing or corrupt."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vil.utils.atomic_write import TEXT


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, with null for NaN and infinity. options: passed to json.dumps."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def format_json(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Format dicts as a JSON array with one dict per line, and yield the text in chunks."""
    separator = "[\n"
    for record in records:
        yield separator + to_json(record)
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def read_dict(file: Path) -> dict:
    """Read the dict in a JSON file. Returns {} if the file cannot be read or has no dict."""
    try:
        found = json.loads(file.read_text(**TEXT))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
