"""Build attention modules by name, and pass the training step to a model's attention modules.

Shapes: B batch, X Y grid rows and columns, L = X*Y local tokens, G global tokens, C channels.
"""

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
    name: str, *, dim: int = 0, num_heads: int = 0, rel_pos: bool = False, **arguments: Any
) -> Attention:
    """Build an attention module by name.

    The module is called as module(x, grid), with x (B, G+L, C), global tokens first, and the grid
    (X, Y). It returns a tensor of x's shape.

    name: a name in the registry `ATTENTIONS`, such as "longformer".
    dim: C. num_heads: number of heads. rel_pos: learn a relative position bias, for classes with
    `has_relative_bias`.
    arguments: the other constructor arguments of the class, whose docstring explains them:
      all: num_global=1 (G), qkv_bias=True, attn_drop=0.0, proj_drop=0.0, grid=None (the grid that
        parameters are sized for; some classes require it)
      longformer: window, sw_exact=0, mode=0, mode_switch=1.0, share_weights=True, backend="auto"
      linformer: num_features, share_kv=True
      performer: num_features, batch_max="auto"
      srformer: ratio, ragged="auto"
      pattern: pattern="axial | local:2" (a text or a `Pattern`), chunk=8, max_reach=0,
        share_weights=True, backend="auto"
      global: share_weights=True
    Raises ValueError for an unknown name or argument (the message lists the choices) and for
    invalid values.
    """
    cls = ATTENTIONS.load(name)
    check_attention(name, cls)
    if dim < 1 or num_heads < 1:
        raise ValueError(
            f"{name} attention needs dim and num_heads of at least 1, got {dim} and {num_heads}"
        )
    for key in arguments:
        if key not in COMMON:
            lookup(own_arguments(cls), key, f"argument of {name} attention")
    needed = [k for k, p in own_arguments(cls).items() if p.default is p.empty]
    if missing := [key for key in needed if key not in arguments]:
        raise ValueError(f"{name} attention needs the argument {', '.join(missing)}")
    if cls.has_relative_bias:
        arguments["rel_pos"] = rel_pos
    elif rel_pos:
        raise ValueError(
            f"{name} attention does not support a relative position bias: set rel_pos to False, "
            "and use an absolute position embedding"
        )
    return cls(dim, num_heads, **arguments)


def own_arguments(cls: type[Attention]) -> dict[str, inspect.Parameter]:
    """Return the constructor arguments of an attention class, except `rel_pos` and those that all
    attention classes have, such as `dim`. Returns {argument name: inspect.Parameter}."""
    return {key: p for key, p in _arguments(cls).items() if key not in (*COMMON, "rel_pos")}


def _arguments(cls: type[Attention]) -> dict[str, inspect.Parameter]:
    """Return the constructor arguments of a class as {argument name: inspect.Parameter}.

    If the constructor passes **kwargs to a base class, the arguments of the base class are
    included.
    """
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
    """Raise ValueError unless a class defines what `Attention` requires of a subclass.

    name: the name of the attention in the registry, for the error message. cls: the class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Attention)):
        raise ValueError(
            f"attention {name!r} must be a subclass of vil.layers.attention.Attention, got {cls!r}"
        )
    needed = (*COMMON, "rel_pos") if cls.has_relative_bias else COMMON
    if missing := [key for key in needed if key not in _arguments(cls)]:
        hint = " (set has_relative_bias = False)" if missing == ["rel_pos"] else ""
        raise ValueError(
            f"the constructor of attention {name!r} ({cls.__name__}) lacks the arguments "
            f"{', '.join(missing)}{hint}"
        )
    for method in ("forward", "macs"):
        if getattr(cls, method) in (getattr(Attention, method), nn.Module.forward):
            raise ValueError(f"attention {name!r} ({cls.__name__}) must define the method {method}")


def check_entry(cls: Any, entry: Entry) -> None:
    """Raise ValueError unless a class matches the base class `Attention` and its registry entry.

    The class must define what `Attention` requires, and its constructor must have the arguments
    that the entry names in `keys` and `feature`.
    """
    check_attention(entry.name, cls)
    feature = entry.facts.get("feature")
    for argument in (*entry.keys, *([feature] if feature else ())):
        lookup(own_arguments(cls), argument, f"argument of {entry.name} attention")


def set_progress(model: nn.Module, progress: TrainStep) -> None:
    """Pass the training step to every attention module. Call this before each forward pass.

    model: the model without wrappers such as DDP. progress: the `TrainStep` that is about to run.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    changes = [module.set_progress(progress, index) for index, module in enumerate(modules)]
    for change in dict.fromkeys(filter(None, changes)):
        log.info("%s (in %d attention modules)", change, changes.count(change))
