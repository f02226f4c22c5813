"""Patterns of 2-D attention: rules that define the keys of each query, for any grid.

Patterns are combined with `|`, `&` and `-`, in Python (`patterns.axial() | patterns.local(5)`) or
as text in a config ("axial | local:5"). `vil.ops.layout` turns a pattern into the lists of key
chunks that a backend computes.

The registry stores the location of each class, so importing this package does not import torch.
"""

from typing import Any

from vil.utils.lazy import lazy_exports
from vil.utils.registry import Registry

_HERE = "vil.ops.patterns"
_lazy, __dir__, __all__ = lazy_exports(
    _HERE,
    {"Pairs": f"{_HERE}.base", "Pattern": f"{_HERE}.base", "parse_pattern": f"{_HERE}.expression"},
)
__all__ += ["PATTERNS", "register_pattern"]

PATTERNS = Registry("pattern", check=f"{_HERE}.base:check_entry")
for _name, _home, _about in (
    ("local", "geometric:Local", "keys up to a distance: local:DISTANCE[,NORM]"),
    ("axial", "geometric:Axial", "keys in the row and the column of the query"),
    ("dilated", "geometric:Dilated", "keys a multiple of STEP away: dilated:STEP"),
    ("swin", "geometric:Swin", "windows that do not overlap: swin:WINDOW[,SHIFT]"),
    ("window", "geometric:ChunkWindow", "the window of longformer: window:SIZE[,SW_EXACT]"),
    ("gaussian", "sampled:gaussian", "sampled keys, mostly near: gaussian:SIGMA,DENSITY[,SEED]"),
    ("random", "sampled:random", "sampled keys: random:DENSITY[,SEED]"),
    ("probability", "sampled:probability", "sampled with your own weight function, in Python only"),
    ("global_tokens", "explicit:GlobalTokens", "the first COUNT tokens are global"),
    ("from_mask", "explicit:from_mask", "a mask of token pairs: from_mask:FILE.npy"),
    ("from_blocks", "explicit:from_blocks", "a mask of chunk pairs: from_blocks:FILE.npy,CHUNK"),
):
    PATTERNS.add(_name, f"{_HERE}.{_home}", _about)


def __getattr__(name: str) -> Any:
    return PATTERNS.load(name) if name in PATTERNS else _lazy(name)


def register_pattern(name: str, cls_or_home: Any, *, about: str = "") -> None:
    """Register a pattern under a name that can be used in pattern text.

    cls_or_home: a subclass of `Pattern`, a function that returns a pattern, or the location of such
    a class or function as a string "module:attribute". The class or function is called with the
    arguments in the pattern text. After `register_pattern("mine", f)`, the text "mine:3,seed=1"
    calls f(3, seed=1).
    about: a short description.

    Raises ValueError for a name that is taken or is not an identifier, and for an object that
    cannot be called. The object at a location is not checked.
    """
    PATTERNS.register(name, cls_or_home, about)
