"""Validate the model cards in weight files. A model card has the settings of the model to build.

Without this check, an untrusted file could make vil build a model of arbitrary size.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vil.models.arch import least_parameters, parse_arch
from vil.utils.errors import CheckpointError, one_line

FORMAT = 1
MAX_SIDE, MAX_CHANNELS, MAX_CLASSES = 16384, 4096, 10_000_000
MAX_RESIZED = 4096  # side of an image before its center is cropped, unless the crop is larger
TIMM_TRANSFORM = ("mean", "std", "crop_pct", "interpolation")  # fields of timm's pretrained configs
TRANSFORM = (*TIMM_TRANSFORM, "background", "value_range")


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Return whether a value is a number, other than a bool, from `low` to `high`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def is_integer(value: Any, low: int, high: int) -> bool:
    """Return whether a value is an int, other than a bool, from `low` to `high`."""
    return isinstance(value, int) and is_number(value, low, high)


def is_size(value: Any) -> bool:
    """Return whether a value is an image size: a side in pixels, or a list of two sides."""
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    return all(is_integer(side, 1, MAX_SIDE) for side in sides)


def is_transform(value: Any) -> bool:
    """Return whether a value is None or a dict of valid image transform settings."""
    return value is None or (
        isinstance(value, dict)
        and set(value) <= set(TRANSFORM)
        and all(map(is_channels, (value[key] for key in ("mean", "std") if key in value)))
        and min(value.get("std", [1]), default=0) > 0
        and is_color(value.get("background", [0, 0, 0]))
        and is_channels(value.get("value_range", []))
        and len(value.get("value_range", [])) in (0, 2)
        and is_number(value.get("crop_pct", 1), 0, 1)
        and isinstance(value.get("interpolation", ""), str)
    )


def timm_transform(card: Mapping) -> dict[str, Any]:
    """Return the input transform of a model card as fields of a pretrained config of timm."""
    transform = card["transform"] or {}
    return {key: transform[key] for key in TIMM_TRANSFORM if key in transform}


def is_color(value: Any) -> bool:
    """Return whether a value is a color: a list of three integers from 0 to 255."""
    return isinstance(value, list) and [is_integer(part, 0, 255) for part in value] == [True] * 3


def is_channels(value: Any) -> bool:
    """Return whether a value is a list of numbers, such as a mean per image channel."""
    return isinstance(value, list) and all(map(is_number, value))


def is_names(value: Any) -> bool:
    """Return whether a value is None or a list of strings."""
    return value is None or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


def is_task(value: Any) -> bool:
    """Return whether a value is a dict with the name of a task, and its settings as {config key:
    list of numbers}."""
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "settings"}
        and isinstance(value["name"], str)
        and isinstance(value["settings"], dict)
        and all(map(is_channels, value["settings"].values()))
    )


def is_arguments(value: Any) -> bool:
    """Return whether a value is None or a dict {name of an attention type: {argument: value}}."""
    return value is None or (
        isinstance(value, dict) and all(isinstance(own, dict) for own in value.values())
    )


Check = tuple[Callable[[Any], bool], str]
RATE: Check = (lambda value: is_number(value, 0, 1), "a number from 0 to 1")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
TEXT: Check = (lambda value: isinstance(value, str), "a string")
MODEL: dict[str, Check] = {
    "arch": TEXT,
    "attention": TEXT,
    "img_size": (is_size, f"one side, or a list of two sides, from 1 to {MAX_SIDE} pixels"),
    "in_chans": (lambda n: is_integer(n, 1, MAX_CHANNELS), f"an integer in 1..{MAX_CHANNELS}"),
    "num_classes": (lambda n: is_integer(n, 0, MAX_CLASSES), f"an integer in 0..{MAX_CLASSES}"),
    "qkv_bias": FLAG,
    "drop_rate": RATE,
    "attn_drop_rate": RATE,
    "drop_path_rate": RATE,
    "norm_embed": FLAG,
    "norm_eps": RATE,
    "avg_pool": FLAG,
    "pos_resize": TEXT,
    "attention_args": (is_arguments, "null, or an object whose values are objects"),
    "grad_checkpoint": FLAG,
}
LATER: dict[str, Check] = {"reversible": FLAG}  # not in cards of earlier versions
TASK: dict[str, Check] = {  # only in cards of other tasks than classification
    "task": (is_task, "an object with a name, and settings that are lists of numbers"),
}
CARD: dict[str, Check] = {
    "transform": (is_transform, f"null, or an object with {', '.join(TRANSFORM)}"),
    "classes": (is_names, "null, or a list of strings"),
}


def check_card(card: Any, source: Path) -> dict:
    """Check the fields of a model card, and return the card. Raises CheckpointError, which names
    the field, if a field is missing or invalid. source: file that contains the card, for messages.
    """
    if not isinstance(card, dict):
        raise CheckpointError(f"{source}: its model card is not a JSON object")
    if is_number(form := card.get("format"), FORMAT + 1):
        raise CheckpointError(
            f"{source}: its model card has the format {form} of a later version of vil: update vil"
        )
    if not isinstance(card.get("model"), dict):
        raise CheckpointError(f"{source}: its model card has no object 'model'")
    model = card["model"]
    later = {name: check for name, check in LATER.items() if name in model}
    task = TASK if "task" in card else {}
    for fields, values in ((CARD | task, card), (MODEL | later, model)):
        for name, (holds, sentence) in fields.items():
            if name not in values:
                raise CheckpointError(f"{source}: its model card has no {name!r}")
            if not holds(values[name]):
                given = f"{values[name]!r:.60}"
                raise CheckpointError(
                    f"{source}: its model card has {name}={given}, expected {sentence}"
                )
    return card


def check_size(card: Mapping, file: Path) -> None:
    """Raise CheckpointError if a model card describes more parameters than its weight file has, or
    images that are much larger before the crop than after it.

    Also raises it if the file cannot be read, or if the card has no valid architecture. Reads only
    the header of the file. card: result of `check_card`.
    """
    model = card["model"]
    try:
        stages = parse_arch(model["arch"], model["attention"])
    except ValueError as error:
        raise CheckpointError(
            f"{file}: its model card has no valid architecture: {error}"
        ) from None
    try:
        with safe_open(file, "pt") as weights:
            slices = map(weights.get_slice, weights.keys())
            held = sum(math.prod(tensor.get_shape()) for tensor in slices)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is missing, damaged or not a weight file ({one_line(error)}): download or "
            "save it again"
        ) from None
    size = model["img_size"] if isinstance(model["img_size"], list) else [model["img_size"]] * 2
    crop_pct = (card["transform"] or {}).get("crop_pct", 1)
    if (largest := max(MAX_RESIZED, 2 * max(size))) * crop_pct < max(size):
        raise CheckpointError(
            f"{file}: its model card has crop_pct={crop_pct}, which resizes images to more than "
            f"{largest} pixels a side"
        )
    least = least_parameters(stages, model["num_classes"], model["in_chans"], size)
    if least > held:
        raise CheckpointError(
            f"{file}: its model card describes a model of at least {least} parameters, but "
            f"the file has {held}"
        )
