"""Look up a name in a table, with a helpful error for an unknown name."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
MAX_CHOICES = 40


def did_you_mean(name: str | None = None) -> str:
    """Return the text "; did you mean NAME?" for the end of a message, or "" if `name` is None."""
    return f"; did you mean {name}?" if name else ""


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return table[name]. Raises ValueError for an unknown name.

    The message suggests the nearest name and lists all choices, or their number if there are more
    than MAX_CHOICES. kind: noun for the names in the message, such as "dataset".
    """
    if name in table:
        return table[name]
    names = {str(key).lower(): key for key in table}
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = did_you_mean(*(repr(names[key]) for key in near))
    choices = ", ".join(table) if len(table) <= MAX_CHOICES else f"{len(table)} of them"
    raise ValueError(f"unknown {kind} {name!r}{hint} (choices: {choices})")
