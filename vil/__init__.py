"""vil: multi-scale vision transformers with local 2-D attention (Vision Longformer), trained from a
config.

Importing the package is cheap: torch is loaded when one of the names below is first used.
"""

import importlib

__version__ = "0.1.0"
__all__ = ["build_attention", "get_model", "list_models", "patch_attention"]

_HOMES = {
    "build_attention": "vil.layers.attention",
    "get_model": "vil.models.zoo",
    "list_models": "vil.models.zoo",
    "patch_attention": "vil.models.patch",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'vil' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
