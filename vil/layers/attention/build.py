"""Build an attention module by name, and pass the training step to all modules of a model."""

import inspect
import logging
from typing import Any

from torch import nn

from vil.layers.attention import ATTENTIONS
from vil.layers.attention.base import Attention
from vil.utils.lookup import lookup
from vil.utils.registry import Entry
from vil.utils.train_step import TrainStep

# constructor arguments of every attention; `rel_pos` only with `has_relative_bias`
COMMON = ("dim", "num_heads", "num_global", "grid", "qkv_bias", "attn_drop", "proj_drop")

log = logging.getLogger(__name__)


def build_attention(
    name: str, *, dim: int, num_heads: int, rel_pos: bool = False, **arguments: Any
) -> Attention:
    """Build an attention module: `module(x (B, G+L, C), (X, Y)) -> (B, G+L, C)`.

    dim: C. rel_pos: learn a relative position bias, for classes with `has_relative_bias`.
    arguments:
      all: num_global=1 (G, the global tokens, which come first), qkv_bias=True, attn_drop=0.0,
        proj_drop=0.0, grid=None (the usual (X, Y), needed where parameters depend on it)
      longformer: window, sw_exact=0, mode=0, mode_switch=1.0, share_weights=True, backend="auto"
      linformer: num_features, share_kv=True
      performer: num_features, batch_max=False
      srformer: ratio, ragged="pad"
      global: share_weights=True
    Raises ValueError for an unknown name or argument (with the choices) and for invalid settings.
    """
    cls = ATTENTIONS.load(name)
    check_attention(name, cls)
    for key in arguments:
        if key not in COMMON:
            lookup(own_arguments(cls), key, f"argument of {name} attention")
    if cls.has_relative_bias:
        arguments["rel_pos"] = rel_pos
    elif rel_pos:
        raise ValueError(
            f"{name} attention has no relative position bias (rel_pos): use the absolute embedding"
        )
    return cls(dim, num_heads, **arguments)


def own_arguments(cls: type[Attention]) -> dict[str, inspect.Parameter]:
    """The constructor arguments of an attention class that are not common to all."""
    return {key: p for key, p in _arguments(cls).items() if key not in (*COMMON, "rel_pos")}


def _arguments(cls: type[Attention]) -> dict[str, inspect.Parameter]:
    """The named constructor arguments of a class, also those that it passes on as **kwargs."""
    arguments: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__[: cls.__mro__.index(Attention) + 1]:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        arguments |= {
            p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    return arguments


def check_attention(name: str, cls: Any) -> None:
    """Raise ValueError if a class breaks the contract of `Attention`."""
    if not (isinstance(cls, type) and issubclass(cls, Attention)):
        raise ValueError(
            f"attention {name!r} must be a subclass of vil.layers.attention.Attention, got {cls!r}"
        )
    needed = (*COMMON, "rel_pos") if cls.has_relative_bias else COMMON
    if missing := [key for key in needed if key not in _arguments(cls)]:
        hint = " (set has_relative_bias = False)" if missing == ["rel_pos"] else ""
        raise ValueError(
            f"the constructor of attention {name!r} ({cls.__name__}) lacks "
            f"{', '.join(missing)}{hint}"
        )
    for method in ("forward", "macs"):
        if getattr(cls, method) in (getattr(Attention, method), nn.Module.forward):
            raise ValueError(f"attention {name!r} ({cls.__name__}) does not define {method}")


def check_entry(cls: Any, entry: Entry) -> None:
    """Raise ValueError if a class breaks `Attention`'s contract or lacks a declared argument."""
    check_attention(entry.name, cls)
    feature = entry.facts.get("feature")
    for argument in (*entry.keys, *([feature] if feature else ())):
        lookup(own_arguments(cls), argument, f"argument of {entry.name} attention")


def set_progress(model: nn.Module, progress: TrainStep) -> None:
    """Pass the step to every attention of the unwrapped model. Call it before each forward pass."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    changes = [module.set_progress(progress, index) for index, module in enumerate(modules)]
    for change in dict.fromkeys(filter(None, changes)):
        log.info("%s (%d attention modules)", change, changes.count(change))
