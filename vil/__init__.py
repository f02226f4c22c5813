"""vil: multi-scale vision transformers with local 2-D attention (Vision Longformer), trained from a
config.

Importing the package is cheap: torch is loaded when one of the names below is first used.
"""

import importlib

__version__ = "0.1.0"
_HOMES = {
    "build_attention": "vil.layers.attention",
    "from_pretrained": "vil.models.hub",
    "get_model": "vil.models.zoo",
    "get_model_weights": "vil.models.weights",
    "get_weight": "vil.models.weights",
    "list_models": "vil.models.zoo",
    "load_weights": "vil.models.checkpoint",
    "patch_attention": "vil.models.patch",
    "save_pretrained": "vil.models.hub",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    home = "vil.models.weights" if name.endswith("_Weights") else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'vil' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
