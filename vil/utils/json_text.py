"""Write JSON without NaN and infinity, which Python's json accepts but other parsers reject."""

import json
import math
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, with null for NaN and infinity. options: passed to json.dumps."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
