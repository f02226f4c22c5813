"""Infer which built-in model a state dict belongs to, from the names and shapes of its tensors."""

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
from vil.pretrained.convert_2021 import BACKBONE, extract_backbone
from vil.pretrained.load_weights import compare, map_names
from vil.utils.errors import CheckpointError

TABLE = "local_relative_position_bias_table"
# attention -> parameter that only one of the two has
PROJECTIONS = {"full": "qkv.weight", "longformer": "kv.weight"}
RESIZABLE = ("x_pos_embed", "y_pos_embed", TABLE, "head.weight", "head.bias")


def infer_arch(state: Mapping[str, Tensor]) -> tuple[str, MsViT]:
    """Find the built-in architecture that a state dict belongs to.

    Returns (name, model): the name, such as "vil_tiny", and a randomly initialized model that fits
    the state dict.

    state: state dict of vil or of the original 2021 code. It determines the model's image size,
    number of classes, and each stage's attention (full or local). The windows follow from the
    relative bias tables. Without such tables, they are the defaults of the architecture.

    For images of other sizes, the model interpolates its position embeddings. If the state dict is
    of a detector, the model crops them, as the original code did.

    Raises CheckpointError, with the nearest model and the differences, if no model fits.
    """
    is_detector = any(key.startswith(BACKBONE) for key in state)
    state, _ = extract_backbone(state)
    name = max(ARCHS, key=lambda name: _overlap(name, state))
    model = _build_fitting(name, state, "crop" if is_detector else "interpolate")
    report = compare(model, state)
    if report.complete:
        return name, model
    raise CheckpointError(
        "the weights fit no built-in model of vil: give --model NAME or a config. The nearest "
        f"model is {name}: {report.one_line()}"
    )


def _infer_attention(name: str, state: Mapping[str, Tensor]) -> list[StageSpec]:
    """Return the stages of architecture `name`, with the attention types that a state dict implies.

    All blocks of a stage get the same attention, full or local. The parameters of the stage's first
    block in the state dict determine it.
    """
    stages = parse_arch(ARCHS[name])
    for i, spec in enumerate(stages):
        prefixes = (f"stages.{i}.blocks.0.attn.", f"layer{i + 1}.1.attn.")
        for attention, leaf in PROJECTIONS.items():
            if any(f"{prefix}{leaf}" in state for prefix in prefixes):
                stages[i] = replace(spec, attention=(attention,) * len(spec.attention))
    return stages


@cache
def _build_on_meta(stages: tuple[StageSpec, ...]) -> MsViT:
    """Build a model with these stages and default settings on the meta device, without weights."""
    with torch.device("meta"):
        return MsViT(stages)


def _overlap(name: str, state: Mapping[str, Tensor]) -> float:
    """Return how well architecture `name` fits a state dict, from 0 to 1: the intersection over
    union of their tensor names.

    A name belongs to the intersection only if the shapes are equal or the tensor can be resized.
    """
    model = _build_on_meta(tuple(_infer_attention(name, state)))
    names, target = map_names(model, state), model.state_dict()
    common = sum(
        key in state and (name.endswith(RESIZABLE) or state[key].shape == target[name].shape)
        for name, key in names.items()
    )
    return common / (len(names) + len(state) - common)


def _build_fitting(name: str, state: Mapping[str, Tensor], pos_resize: str) -> MsViT:
    """Build architecture `name` with the image size, windows and number of classes that a state
    dict implies. pos_resize: how the model fits position embeddings to a grid, "interpolate" or
    "crop"."""
    stages, settings = _infer_attention(name, state), dict(DEFAULTS.get(name, {}))
    settings["num_classes"] = len(state["head.weight"]) if "head.weight" in state else 0
    names = map_names(_build_on_meta(tuple(stages)), state)
    shapes = {name: state[key].shape for name, key in names.items() if key in state}
    stride, sides = 1, []
    for i, spec in enumerate(stages):
        stride *= spec.patch
        prefix = rf"stages\.{i}\."
        lines = [_find_shape(shapes, rf"{prefix}.*{axis}_pos_embed") for axis in "xy"]
        if all(lines):
            sides.append(tuple(line[1] * stride for line in lines))
        if table := _find_shape(shapes, rf"{prefix}.*{TABLE}"):
            side = isqrt(table[0])
            if set(spec.attention) == {"full"}:
                sides.append(((side + 1) // 2 * stride,) * 2)
            else:
                stages[i] = replace(spec, attn_size=max((side + 1) // 4, 1))
    if sides:  # the first grid is the finest: coarser ones may have dropped rows
        rows, cols = sides[0]
        settings["img_size"] = rows if rows == cols else (rows, cols)
    return MsViT(stages, pos_resize=pos_resize, **settings)


def _find_shape(shapes: Mapping[str, torch.Size], pattern: str) -> torch.Size | None:
    return next((shape for name, shape in shapes.items() if re.fullmatch(pattern, name)), None)
