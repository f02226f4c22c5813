"""Registry of the attention modules, with the config keys that set their arguments.

Each class is imported when it is first used, so importing this package does not import torch.
"""

from collections.abc import Mapping
from typing import Any

from vil.utils.lazy import lazy_exports
from vil.utils.registry import Key, Registry

_HERE = "vil.layers.attention"
__getattr__, __dir__, __all__ = lazy_exports(
    _HERE,
    {
        "Attention": f"{_HERE}.base",
        "FullAttention": f"{_HERE}.full",
        "GlobalOnlyAttention": f"{_HERE}.global_only",
        "LinformerAttention": f"{_HERE}.linformer",
        "LongformerAttention": f"{_HERE}.longformer",
        "PerformerAttention": f"{_HERE}.performer",
        "SRAttention": f"{_HERE}.srformer",
        "build_attention": f"{_HERE}.build",
        "own_arguments": f"{_HERE}.build",
        "set_progress": f"{_HERE}.build",
    },
)
__all__ += ["ATTENTIONS", "register_attention"]


# Facts of an entry: `feature`, the constructor argument that the letter f of an ARCH string sets;
# `other_keys`, config keys that concern the attention but set no constructor argument.
ATTENTIONS = Registry("attention", check=f"{_HERE}.build:check_entry")
_MSVIT = "MODEL.VIT.MSVIT"
ATTENTIONS.add("full", f"{_HERE}.full:FullAttention", "every token attends to every token")
ATTENTIONS.add(
    "longformer",
    f"{_HERE}.longformer:LongformerAttention",
    "a token attends to a 2-D window and the global tokens",
    keys={
        "share_weights": f"{_MSVIT}.SHARE_W",
        "sw_exact": f"{_MSVIT}.SW_EXACT",
        "mode": f"{_MSVIT}.MODE",
        "mode_switch": f"{_MSVIT}.VIL_MODE_SWITCH",
        "backend": f"{_MSVIT}.BACKEND",
    },
    feature="window",
    other_keys=(f"{_MSVIT}.TUNE", f"{_MSVIT}.ONLY_GLOBAL"),
)
ATTENTIONS.add(
    "linformer",
    f"{_HERE}.linformer:LinformerAttention",
    "a token attends to a fixed number of mixtures of all tokens",
    keys={"share_kv": f"{_MSVIT}.SHARE_KV"},
    feature="num_features",
)
ATTENTIONS.add(
    "performer",
    f"{_HERE}.performer:PerformerAttention",
    "softmax attention approximated by random features",
    keys={"batch_max": f"{_MSVIT}.PERFORMER_BATCH_MAX"},
    feature="num_features",
)
ATTENTIONS.add(
    "srformer",
    f"{_HERE}.srformer:SRAttention",
    "a token attends to a downsampled map",
    keys={"ragged": f"{_MSVIT}.SR_RAGGED"},
    feature="ratio",
)
ATTENTIONS.add(
    "global",
    f"{_HERE}.global_only:GlobalOnlyAttention",
    "a local token attends to the global tokens only",
    keys={"share_weights": f"{_MSVIT}.SHARE_W"},
    other_keys=(f"{_MSVIT}.ONLY_GLOBAL",),
)


def register_attention(
    name: str,
    cls_or_home: Any,
    *,
    keys: Mapping[str, str | Key] | None = None,
    feature: str | None = None,
    about: str = "",
) -> None:
    """Register an attention class under a name.

    cls_or_home: a subclass of `Attention`, or its location as a string "module:Class". A class
    given as a string is imported and checked when it is first built.
    keys: {constructor argument: config key that sets it}.
    feature: the constructor argument that the letter f of an ARCH string sets.

    Raises ValueError for a name that is already taken, and for a class that does not define what
    `vil.layers.attention.base.Attention` requires.
    """
    facts = {"feature": feature} if feature else {}
    ATTENTIONS.register(name, cls_or_home, about, keys=keys, **facts)
