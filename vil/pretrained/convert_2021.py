"""Convert state dicts of the original Vision Longformer code of 2021, the reference.

Each of vil's parameter names maps to one name of the reference. Attention projections can be
converted between full attention and longformer attention. In files of the reference's detection
code, the parameter names of the backbone have a prefix.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention
from vil.models.vision_longformer import MsViT

log = logging.getLogger(__name__)
FIRST = ("layer1.0.proj.weight", "layer1.0.cls_token")  # other networks have a layer1 too
NORM_EPS = 1e-6  # epsilon of every LayerNorm of the reference, which ignored its key LN_EPS
BACKBONE = "backbone.bottom_up."
INDEX_BUFFERS = ("relative_position_index", "calls_since_last_redraw")
# shared weights that the reference stores twice: pattern of the copy's name -> the original's name
ALIASES = {r"\b(query|kv|proj)_global\.": r"\1.", r"\bproj_v$": "proj_k"}
PROJECTION = re.compile(r"(.*\.)?(qkv|query|kv|proj)(_global)?\.(weight|bias)")


def get_2021_names(model: nn.Module) -> dict[str, str]:
    """Return {name in the model's state dict: name in the original Vision Longformer code (2021)}.

    model: an MsViT, or an attention module, for which each name maps to itself.
    """
    return {name: _to_2021(name) for name in model.state_dict()}


def has_2021_names(state: Iterable[str]) -> bool:
    """Return whether the keys of a state dict are those of a full model of the original Vision
    Longformer code (2021)."""
    return any(key in FIRST for key in state)


def extract_backbone(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Split a detector's state dict into (state dict of the backbone, names of all other keys).

    The prefix of the backbone's keys is removed. If no key has this prefix, the state dict is not a
    detector's and is returned unchanged, with an empty list.
    """
    backbone = {k.removeprefix(BACKBONE): v for k, v in state.items() if k.startswith(BACKBONE)}
    if not backbone:
        return dict(state), []
    return backbone, [key for key in state if not key.startswith(BACKBONE)]


def convert_projections(
    state: Mapping[str, Tensor], wanted: Iterable[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Make the attention projections that a model needs from those in a state dict.

    Full attention has qkv (3C, C). Longformer attention has query (C, C) and kv (2C, C), which are
    the parts of qkv. Missing projections for global tokens are made from those for local tokens.

    wanted: key names of the model. Projections from which others were made are removed if they are
    not in `wanted`. Returns (new state dict, a line of text per projection made).
    """
    result, lines, used = dict(state), [], set()
    for name in wanted:
        match = None if name in state else PROJECTION.fullmatch(name)
        made = match and _make_projection(state, match[1] or "", match[2], match[4])
        if made:
            result[name], sources = made
            lines.append(f"{name} of {' and '.join(sources)}")
            used |= set(sources)
    for name in used - set(wanted):
        del result[name]
    return result, lines


def _make_projection(
    state: Mapping[str, Tensor], prefix: str, kind: str, leaf: str
) -> tuple[Tensor, list[str]] | None:
    """Make a missing attention projection from other projections in the state dict.

    prefix: start of the attention module's keys, "" or ending in a dot. kind: "qkv", "query", "kv"
    or "proj". leaf: "weight" or "bias". Returns (projection, names of its source tensors), or None
    if the state dict lacks them.
    """
    same, qkv, query, kv = (f"{prefix}{part}.{leaf}" for part in (kind, "qkv", "query", "kv"))
    if same in state:
        return state[same], [same]
    if kind == "qkv" and query in state and kv in state:
        return torch.cat([state[query], state[kv]]), [query, kv]
    if kind in ("query", "kv") and qkv in state and len(state[qkv]) % 3 == 0:
        third = len(state[qkv]) // 3
        return (state[qkv][:third] if kind == "query" else state[qkv][third:]), [qkv]
    return None


def is_redundant(key: str, state: Mapping[str, Tensor], unused: set[str]) -> bool:
    """Return whether a key of a state dict of the original Vision Longformer code can be ignored.

    This is the case for index buffers, bias tables that the code never used, and copies of a shared
    weight that equal the original. unused: names of the unused bias tables.
    """
    if key.endswith(INDEX_BUFFERS) or key in unused:
        return True
    twins = [re.sub(alias, name, key) for alias, name in ALIASES.items() if re.search(alias, key)]
    return any(twin in state and torch.equal(state[twin], state[key]) for twin in twins)


def find_unused_tables(module: nn.Module) -> set[str]:
    """Return the names of attention parameters that the original Vision Longformer code (2021)
    saved but never used. The names are those in that code."""
    return {
        _to_2021(f"{name}.{leaf}".removeprefix("."))
        for name, part in module.named_modules()
        if isinstance(part, Attention)
        for leaf in part.unused_2021
    }


def use_2021_rules(model: MsViT) -> None:
    """Make a model compute like the original Vision Longformer code (2021).

    Use this for weights of that code. Sets attention arguments that are "auto", and the epsilon of
    all LayerNorms, to the values of that code. Updates `model.settings`, and logs a warning if
    anything changed.
    """
    changed: dict[str, dict[str, Any]] = {}
    for stage, spec in zip(model.stages, model.specs):
        for block, name in zip(stage.blocks, spec.attention):
            if rule := block.attn.use_2021_rule():
                changed[name] = rule
    if changed:
        given = model.settings["attention_args"] or {}
        rules = {name: {**given.get(name, {}), **rule} for name, rule in changed.items()}
        model.settings["attention_args"] = {**given, **rules}
    words = [f"{name} {k}={v}" for name, rule in changed.items() for k, v in rule.items()]
    if model.settings["norm_eps"] != NORM_EPS:
        model.settings["norm_eps"] = NORM_EPS
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = NORM_EPS
        words.append(f"epsilon {NORM_EPS:g} of every LayerNorm")
    if words:
        log.warning(
            "the weights come from the original Vision Longformer code (2021), so the model uses "
            "the settings of that code: %s",
            ", ".join(words),
        )


def _to_2021(name: str) -> str:
    match = re.match(r"stages\.(\d+)\.(embed|blocks\.(\d+))\.(.+)", name)
    if not match:
        return name
    layer, rest = f"layer{int(match[1]) + 1}", match[4].removeprefix("position.")
    if match[2] == "embed":
        return f"{layer}.0.{rest}"
    number = 2 * int(match[3]) + (1 if rest.startswith(("norm1", "attn")) else 2)
    return f"{layer}.{number}.{re.sub('^norm[12]', 'norm', rest)}"
