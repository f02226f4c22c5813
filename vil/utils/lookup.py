"""Look up a name in a table. A wrong name is an error with the choices and the nearest one."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
MAX_CHOICES = 40


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return table[name]. The ValueError for an unknown name has the `kind` of thing, the nearest
    name and all choices or, in a very long table, their number."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    choices = ", ".join(table) if len(table) <= MAX_CHOICES else f"{len(table)} of them"
    raise ValueError(f"unknown {kind} {name!r}{hint} (choices: {choices})")
