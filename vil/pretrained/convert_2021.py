"""Convert state dicts of the 2021 reference: names, redundant entries, attention projections.

Names are mapped one to one. Projections of full attention convert to longformer's and back: both
have the same queries, keys and values, in one matrix or in two. Files of the reference's detection
code have the backbone under a prefix. Source of the rules: the reference's converter for detection.
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
# shared weights that the reference stores twice: pattern of the copy -> the first name
ALIASES = {r"\b(query|kv|proj)_global\.": r"\1.", r"\bproj_v$": "proj_k"}
PROJECTION = re.compile(r"(.*\.)?(qkv|query|kv|proj)(_global)?\.(weight|bias)")


def get_2021_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the model's state dict to its name in the 2021 reference.

    model: an MsViT, or an attention module, whose names are the same in the reference.
    """
    return {name: _to_2021(name) for name in model.state_dict()}


def has_2021_names(state: Iterable[str]) -> bool:
    """Whether the keys are the reference's names of a full model."""
    return any(key.startswith("layer1.0.") and key.endswith(FIRST) for key in state)


def extract_backbone(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the backbone of a detector's state dict (or all of another), and the other keys."""
    backbone = {k.removeprefix(BACKBONE): v for k, v in state.items() if k.startswith(BACKBONE)}
    if not backbone:
        return dict(state), []
    return backbone, [key for key in state if not key.startswith(BACKBONE)]


def convert_projections(
    state: Mapping[str, Tensor], wanted: Iterable[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Make the projections in `wanted` that the state lacks from those it has.

    Returns the new state, and a line for each converted projection. qkv (3C, C) is query (C, C)
    stacked on kv (2C, C). Projections of global tokens (query_global, ...) become copies of those
    of local tokens.
    """
    result, lines = dict(state), []
    for name in wanted:
        match = None if name in state else PROJECTION.fullmatch(name)
        made = match and _make_projection(state, match[1] or "", match[2], match[4])
        if made:
            result[name], sources = made
            lines.append(f"{name} of {' and '.join(sources)}")
    used = {source for line in lines for source in line.split(" of ")[1].split(" and ")}
    for name in used - set(wanted):
        del result[name]
    return result, lines


def _make_projection(
    state: Mapping[str, Tensor], prefix: str, kind: str, leaf: str
) -> tuple[Tensor, list[str]] | None:
    """Return one projection and the names it is made of, None if they are missing."""
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
    """Whether a key holds no weight: an index buffer, an unused table, or an equal alias."""
    if key.endswith(INDEX_BUFFERS) or key in unused:
        return True
    twins = [re.sub(alias, name, key) for alias, name in ALIASES.items() if re.search(alias, key)]
    return any(twin in state and torch.equal(state[twin], state[key]) for twin in twins)


def find_unused_tables(module: nn.Module) -> set[str]:
    """Return the parameters, in the reference's names, that it stored and never read."""
    return {
        _to_2021(f"{name}.{leaf}".removeprefix("."))
        for name, part in module.named_modules()
        if isinstance(part, Attention)
        for leaf in part.unused_2021
    }


def warn_changed_defaults(model: nn.Module) -> None:
    """Warn if the reference's weights were trained under a rule that is no longer the default."""
    for part in model.modules():
        if isinstance(part, Attention) and (change := part.changed_since_2021()):
            log.warning(change)
            return


def _to_2021(name: str) -> str:
    match = re.match(r"stages\.(\d+)\.(embed|blocks\.(\d+))\.(.+)", name)
    if not match:
        return name
    layer, rest = f"layer{int(match[1]) + 1}", match[4].removeprefix("position.")
    if match[2] == "embed":
        return f"{layer}.0.{rest}"
    number = 2 * int(match[3]) + (1 if rest.startswith(("norm1", "attn")) else 2)
    return f"{layer}.{number}.{re.sub('^norm[12]', 'norm', rest)}"
