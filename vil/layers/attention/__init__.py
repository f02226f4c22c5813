"""Registry of the attention modules, with the config keys that set their constructor arguments.

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
        "PatternAttention": f"{_HERE}.pattern",
        "PerformerAttention": f"{_HERE}.performer",
        "SRAttention": f"{_HERE}.srformer",
        "build_attention": f"{_HERE}.build",
        "own_arguments": f"{_HERE}.build",
        "set_progress": f"{_HERE}.build",
        "TrainStep": "vil.utils.train_step",
    },
)
__all__ += ["ATTENTIONS", "register_attention"]

# Facts of an entry: `feature`, the constructor argument that the letter f of an ARCH string sets;
# `other_keys`, config keys that concern the attention but set no constructor argument; `by_block`,
# the arguments whose text may differ by stage and block (see vil.models.arch.split_by_block);
# `not_streamed`, why vil.stream refuses the attention.
ATTENTIONS = Registry("attention", check=f"{_HERE}.build:check_entry")
_MSVIT = "MODEL.VIT.MSVIT"
DEFAULT_PATTERN = "axial | local:2"
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
    "pattern",
    f"{_HERE}.pattern:PatternAttention",
    "a token attends to a 2-D pattern (PATTERN) and the global tokens",
    keys={
        "share_weights": f"{_MSVIT}.SHARE_W",
        "pattern": Key(
            f"{_MSVIT}.PATTERN",
            DEFAULT_PATTERN,
            "pattern: which keys a token attends to (docs/guides/patterns.md). / separates "
            "stages, ; patterns that alternate over the blocks of a stage.",
        ),
        "max_reach": Key(
            f"{_MSVIT}.PATTERN_REACH",
            0,
            "pattern: largest displacement with an entry in the relative bias table; pairs "
            "farther apart share the outermost ones. 0: the pattern's, or the image's if the "
            "pattern has none.",
            lambda value: value >= 0,
            "at least 0",
        ),
        "backend": f"{_MSVIT}.BACKEND",
    },
    feature="chunk",
    by_block=("pattern",),
    other_keys=(f"{_MSVIT}.TUNE",),
    not_streamed="the keys of a pattern may lie in any row",
)
ATTENTIONS.add(
    "linformer",
    f"{_HERE}.linformer:LinformerAttention",
    "a token attends to a fixed number of mixtures of all tokens",
    keys={"share_kv": f"{_MSVIT}.SHARE_KV"},
    feature="num_features",
    not_streamed="its keys are mixtures of all tokens",
)
ATTENTIONS.add(
    "performer",
    f"{_HERE}.performer:PerformerAttention",
    "softmax attention approximated by random features",
    keys={"batch_max": f"{_MSVIT}.PERFORMER_BATCH_MAX"},
    feature="num_features",
    not_streamed="its features are normalized over all tokens",
)
ATTENTIONS.add(
    "srformer",
    f"{_HERE}.srformer:SRAttention",
    "a token attends to a downsampled map",
    keys={"ragged": f"{_MSVIT}.SR_RAGGED"},
    feature="ratio",
    not_streamed="its keys are a downsampled map of all tokens",
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

    cls_or_home: a subclass of `Attention`, or its location as a string "module:Class". The string
    is imported and checked when a module of the class is first built.
    keys: the config keys of the constructor arguments, {argument: config key}.
    feature: the constructor argument that the letter f of an ARCH string (the config key
    MODEL.VIT.MSVIT.ARCH) sets. For example, "f7" sets this argument to 7.
    about: a short description.

    Raises ValueError for a name that is already taken, and for a class that does not define what
    `vil.layers.attention.base.Attention` requires.
    """
    facts = {"feature": feature} if feature else {}
    ATTENTIONS.register(name, cls_or_home, about, keys=keys, **facts)
