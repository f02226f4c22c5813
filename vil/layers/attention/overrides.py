"""Detect attention modules whose methods a user has replaced."""

from collections.abc import Iterable

from torch import nn


def overrides(module: nn.Module, names: Iterable[str]) -> bool:
    """Return whether a user has replaced one of the methods `names` of an attention module.

    A method is replaced if it is set on the module itself, or if a class outside of
    `vil.layers.attention` defines it.
    """
    own, cls = vars(module), type(module)
    return any(
        name in own or not getattr(cls, name).__module__.startswith(f"{__package__}.")
        for name in names
    )
