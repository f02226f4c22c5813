"""Convert text to the type of a key's default value.

The type is not left to a YAML parser, which would read `1e-3` as a string and `no` as a bool for
any key. Text such as `(1, 2)` is parsed as a Python literal of at most MAX_LITERAL characters.
"""

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_LITERAL = 10_000  # characters of one value on the command line, or written as (1, 2)
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
BRACKETS = ("(", "[")
NOTHING = ("None", "null", "Null", "NULL", "~")


class Quoted(str):
    """A string that was quoted in the config. If its key has no declared type, it stays a string,
    even if it looks like a number."""


def coerce(value: Any, default: Any, element: Any = 0.0) -> Any:
    """Convert a value, as written in a config, to the type of `default`. Raises ValueError if the
    value cannot be converted.

    element: a value with the type of the elements, used if `default` is an empty list or tuple.
    """
    if isinstance(default, tuple | list):
        if not default and value == "auto":
            return type(default)()
        element = default[0] if default else element
        if not isinstance(value, list):  # on the command line `a,b` and `0.5` are lists too
            value = _items(value) if value[:1] in BRACKETS else value.split(",")
        return type(default)(coerce(item, element) for item in value)
    if isinstance(value, list):
        raise ValueError("a list")
    return READERS[type(default)](value)


def free(value: Any) -> Any:
    """Convert the value of a key that has no declared type. Returns None, a bool, a number or a
    list if the text can be parsed as one of these; otherwise returns a string."""
    if isinstance(value, list):
        return [free(item) for item in value]
    if isinstance(value, Quoted):
        return str(value)
    if value in NOTHING:
        return None
    for read in (_truth, int, _number, lambda text: free(_items(text))):
        try:
            return read(value)
        except ValueError:
            continue
    return _text(value)


def kind(default: Any, element: Any = 0.0) -> str:
    """Describe the type of a key's default value, such as "tuple of float". element: a value with
    the type of the elements, used if `default` is an empty list or tuple."""
    if isinstance(default, tuple | list):
        return f"{type(default).__name__} of {kind(default[0] if default else element)}"
    return type(default).__name__


def _truth(text: str) -> bool:
    if text.lower() not in TRUTH:
        raise ValueError(text)
    return TRUTH[text.lower()]


def _integer(text: str) -> int:
    """Return an int of at most 64 bits. Raises ValueError for a larger one, which torch refuses."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(text)
    return number


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _text(text: str) -> str:
    """Return the value of a string key. A pair of quotes around the text is removed: the shell
    passes the argument "'no'" as 'no', and the value is no. Raises ValueError for a word that means
    null, such as None, unless it is quoted."""
    if isinstance(text, Quoted):
        return str(text)
    if text in NOTHING:
        raise ValueError(text)
    quoted = text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1
    return text[1:-1] if quoted else text


def _items(text: str) -> list[Any]:
    """Parse a list written as text, such as "(1, 2)" or "[1, 2]". Returns the items, still as text.
    Raises ValueError if the text is not a list."""
    if text[:1] not in BRACKETS or len(text) > MAX_LITERAL:
        raise ValueError(text)
    try:
        return as_written(list(ast.literal_eval(text)))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error


def as_written(value: Any) -> Any:
    """Convert a Python value to the form that values have in config files: a string, or a list of
    strings and lists. Raises ValueError for a mapping."""
    if isinstance(value, Mapping):
        raise ValueError("expected plain values in a list, got a mapping")
    if isinstance(value, tuple | list):
        return [as_written(item) for item in value]
    return Quoted(value) if isinstance(value, str) else str(value)


READERS: dict[type, Callable[[str], Any]] = {
    bool: _truth,
    int: _integer,
    float: _number,
    str: _text,
}
