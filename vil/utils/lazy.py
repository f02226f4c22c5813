"""Lazy exports of a package: a public name is imported at its first use, not with the package."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return (`__getattr__`, `__dir__`, `__all__`) of a package that imports names at first use.

    package: full name of the package. homes: {exported name: module that defines it}.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__, lambda: sorted(homes), list(homes)
