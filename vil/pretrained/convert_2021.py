"""The 2021 reference's files: its names, what it stored besides weights, and its other layouts.

Names are mapped exactly. Weights of full attention go into longformer attention and back: both have
the same queries, keys and values, in one matrix or in two. Files of its detection code have the
backbone under a prefix. Source of the rules: the reference's converter for detection.
"""

import logging
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention

log = logging.getLogger(__name__)
FIRST = ("layer1.0.proj.weight", "layer1.0.cls_token")  # other networks have a layer1 too
BACKBONE = "backbone.bottom_up."
INDEX_BUFFERS = ("relative_position_index", "calls_since_last_redraw")
# what the reference stores twice when weights are shared: the copy -> its first name
ALIASES = {r"\b(query|kv|proj)_global\.": r"\1.", r"\bproj_v$": "proj_k"}
PROJECTION = re.compile(r"(.*\.)?(qkv|query|kv|proj)(_global)?\.(weight|bias)")


def original_names(model: nn.Module) -> dict[str, str]:
    """For each entry of the model's state dict, its name in the 2021 reference.

    model: an MsViT; or an attention module, whose names are the reference's already.
    """
    return {name: _original_name(name) for name in model.state_dict()}


def is_original(state: Iterable[str]) -> bool:
    """Whether these are the reference's names of a whole model."""
    return any(key.startswith("layer1.0.") and key.endswith(FIRST) for key in state)


def backbone_of(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The backbone of a detector's state dict, and the names of what is not its; another state dict
    is returned as it is."""
    found = {k.removeprefix(BACKBONE): v for k, v in state.items() if k.startswith(BACKBONE)}
    return (found, [key for key in state if not key.startswith(BACKBONE)]) if found else (
        dict(state), []
    )  # fmt: skip


def convert_projections(
    state: Mapping[str, Tensor], wanted: Iterable[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with the projections that `wanted` has and it has not, made from those it has; and
    a line for each.

    qkv (3C, C) is query (C, C) and kv (2C, C), one below the other. What global tokens have of
    their own (query_global, ...) is a copy of what local tokens have.
    """
    found, lines = dict(state), []
    absent = [name for name in wanted if name not in state]
    for name in absent:
        match = PROJECTION.fullmatch(name)
        made = match and _projection(state, match[1] or "", match[2], match[4])
        if made:
            found[name], sources = made
            lines.append(f"{name} of {' and '.join(sources)}")
    used = {source for line in lines for source in line.split(" of ")[1].split(" and ")}
    for name in used - set(wanted):
        del found[name]
    return found, lines


def _projection(
    state: Mapping[str, Tensor], prefix: str, kind: str, leaf: str
) -> tuple[Tensor, list[str]] | None:
    """One projection of an attention, and the names it is made of; None where they are absent."""
    own, qkv, query, kv = (f"{prefix}{part}.{leaf}" for part in (kind, "qkv", "query", "kv"))
    if own in state:
        return state[own], [own]
    if kind == "qkv" and query in state and kv in state:
        return torch.cat([state[query], state[kv]]), [query, kv]
    if kind in ("query", "kv") and qkv in state and len(state[qkv]) % 3 == 0:
        third = len(state[qkv]) // 3
        return (state[qkv][:third] if kind == "query" else state[qkv][third:]), [qkv]
    return None


def is_surplus(key: str, state: Mapping[str, Tensor], unused: set[str]) -> bool:
    """Whether a key has no weight of its own: index buffer, unused table, equal alias."""
    if key.endswith(INDEX_BUFFERS) or key in unused:
        return True
    twins = [re.sub(alias, name, key) for alias, name in ALIASES.items() if re.search(alias, key)]
    return any(twin in state and torch.equal(state[twin], state[key]) for twin in twins)


def unused_tables(module: nn.Module) -> set[str]:
    """Parameters that the reference stored and never read (its names)."""
    return {
        _original_name(f"{name}.{leaf}".removeprefix("."))
        for name, part in module.named_modules()
        if isinstance(part, Attention)
        for leaf in part.unused_2021
    }


def warn_of_other_rules(model: nn.Module) -> None:
    """The reference's weights were trained under rules that are defaults no longer."""
    for part in model.modules():
        if isinstance(part, Attention) and (change := part.changed_since_2021()):
            log.warning(change)
            return


def _original_name(name: str) -> str:
    match = re.match(r"stages\.(\d+)\.(embed|blocks\.(\d+))\.(.+)", name)
    if not match:
        return name
    layer, rest = f"layer{int(match[1]) + 1}", match[4].removeprefix("position.")
    if match[2] == "embed":
        return f"{layer}.0.{rest}"
    number = 2 * int(match[3]) + (1 if rest.startswith(("norm1", "attn")) else 2)
    return f"{layer}.{number}.{re.sub('^norm[12]', 'norm', rest)}"
