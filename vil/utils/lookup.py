"""Look a name up in one of the package's tables; a wrong name is answered with the choices and the
nearest one.
"""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
MANY = 40


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """table[name], or a ValueError that names `what` was looked up, the nearest name and every
    choice (of a very long table, their number).
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    choices = ", ".join(table) if len(table) <= MANY else f"{len(table)} of them"
    raise ValueError(f"unknown {what} {name!r}{hint} (choices: {choices})")
