"""Detect attention modules whose methods a user has replaced."""

from collections.abc import Iterable

from torch import nn


def overrides(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether a module itself, or a class that is not part of this package, defines one of the
    methods `names`."""
    own, cls = vars(module), type(module)
    return any(
        name in own or not getattr(cls, name).__module__.startswith(f"{__package__}.")
        for name in names
    )
