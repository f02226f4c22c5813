"""Which of our models a file of weights belongs to, by the sizes of its tensors."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import isqrt

import torch
from torch import Tensor

from vil.models.arch import StageSpec, parse_arch
from vil.models.registry import ARCHS, DEFAULTS
from vil.models.vision_longformer import MsViT
from vil.pretrained.convert_2021 import BACKBONE, backbone_of
from vil.pretrained.load_weights import compare, names_in
from vil.utils.errors import CheckpointError

TABLE = "local_relative_position_bias_table"
KINDS = {"full": "qkv.weight", "longformer": "kv.weight"}
MAY_CHANGE = ("x_pos_embed", "y_pos_embed", TABLE, "head.weight", "head.bias")


def recognise(state: Mapping[str, Tensor]) -> tuple[str, MsViT]:
    """The named model whose weights these are, under ours or the 2021 reference's names, freshly
    made.

    Image size, windows, classes, and whether a stage's attention is full or local are read from
    the tensors; what the tensors do not tell (windows without a relative bias) is the
    architecture's own. A detector's backbone crops its positions, as the reference's did.
    Raises CheckpointError, with the nearest model and what does not fit it, if there is none.
    """
    backbone, _ = backbone_of(state)
    of_detector = any(key.startswith(BACKBONE) for key in state)
    name = max(ARCHS, key=lambda name: _likeness(name, backbone))
    model = _fitting(name, backbone, "crop" if of_detector else "interpolate")
    report = compare(model, backbone)
    if report.complete:
        return name, model
    raise CheckpointError(
        f"these are weights of none of the named models; {name} is the nearest: {report}\n"
        "  (give --model NAME, or a config)"
    )


def _stages(name: str, state: Mapping[str, Tensor]) -> list[StageSpec]:
    """The architecture's, each with full or local attention as its first block has in the state."""
    stages = parse_arch(ARCHS[name])
    for at, spec in enumerate(stages):
        first = (f"stages.{at}.blocks.0.attn.", f"layer{at + 1}.1.attn.")
        for kind, leaf in KINDS.items():
            if any(f"{prefix}{leaf}" in state for prefix in first):
                stages[at] = replace(spec, attention=(kind,) * len(spec.attention))
    return stages


@cache
def _plain(stages: tuple[StageSpec, ...]) -> MsViT:
    """A model in its usual sizes, without memory."""
    with torch.device("meta"):
        return MsViT(stages)


def _likeness(name: str, state: Mapping[str, Tensor]) -> float:
    """The share that names of both, with equal shapes unless these may change, have in all."""
    model = _plain(tuple(_stages(name, state)))
    names, wanted = names_in(model, state), model.state_dict()
    both = [
        ours
        for ours, theirs in names.items()
        if theirs in state
        and (ours.endswith(MAY_CHANGE) or state[theirs].shape == wanted[ours].shape)
    ]
    return len(both) / (len(names) + len(state) - len(both))


def _fitting(name: str, state: Mapping[str, Tensor], pos_resize: str) -> MsViT:
    """The model, in the sizes that the state has."""
    stages, settings = _stages(name, state), dict(DEFAULTS.get(name, {}))
    settings["num_classes"] = len(state["head.weight"]) if "head.weight" in state else 0
    names = names_in(_plain(tuple(stages)), state)
    shapes = {ours: state[theirs].shape for ours, theirs in names.items() if theirs in state}
    reduction, sides = 1, []
    for at, spec in enumerate(stages):
        reduction *= spec.patch
        prefix = rf"stages\.{at}\."
        lines = [_first(shapes, rf"{prefix}.*{axis}_pos_embed") for axis in "xy"]
        if all(lines):
            sides.append(tuple(line[1] * reduction for line in lines))
        if table := _first(shapes, rf"{prefix}.*{TABLE}"):
            side = isqrt(table[0])
            if set(spec.attention) == {"full"}:
                sides.append(((side + 1) // 2 * reduction,) * 2)
            else:
                stages[at] = replace(spec, attn_size=max((side + 1) // 4, 1))
    if sides:  # the first is the finest: a coarse grid may have lost rows
        rows, columns = sides[0]
        settings["img_size"] = rows if rows == columns else (rows, columns)
    return MsViT(stages, pos_resize=pos_resize, **settings)


def _first(shapes: Mapping[str, torch.Size], pattern: str) -> torch.Size | None:
    return next((shape for name, shape in shapes.items() if re.fullmatch(pattern, name)), None)
