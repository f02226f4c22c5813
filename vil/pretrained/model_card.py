"""What a model is, in words that JSON can hold, and the model again from them."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

import vil
from vil.models.arch import format_arch, format_attention, parse_arch
from vil.models.vision_longformer import MsViT
from vil.utils.atomic_write import sha256_of
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup

FORMAT = 1
TRANSFORM = ("mean", "std", "crop_pct", "interpolation")


def describe(
    model: MsViT,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    source: Path | None = None,
) -> dict:
    """The model's stages and settings, and what goes with its weights.

    transform: mean, std, crop_pct and interpolation of its input, by timm's names. classes: their
    names. Both are by default what the model's `notes` say. source: the file that the weights come
    from, named with its SHA-256. Raises ValueError for another key in transform, names of another
    number of classes, another head than a linear one, and a pool of timm's.
    """
    transform, classes = (
        transform or model.notes.get("transform"),
        classes or model.notes.get("classes"),
    )
    if unknown := set(transform or {}) - set(TRANSFORM):
        raise ValueError(f"transform has {', '.join(TRANSFORM)}, not {', '.join(sorted(unknown))}")
    if not isinstance(model.head, nn.Linear | nn.Identity):
        raise ValueError(f"the head must be one linear layer or none: {type(model.head).__name__}")
    head = model.head.out_features if isinstance(model.head, nn.Linear) else 0
    if classes and len(classes) != head:
        raise ValueError(f"{len(classes)} names for {head} classes")
    if model.global_pool not in ("avg", "token"):
        raise ValueError(
            f"global_pool {model.global_pool!r} is timm's: save it by timm.models.save_for_hf"
        )
    stages = {"arch": format_arch(model.specs), "attention": format_attention(model.specs)}
    found = {
        "format": FORMAT,
        "version": vil.__version__,
        "model": {**stages, **model.settings, "num_classes": head},
        "transform": dict(transform) if transform else None,
        "classes": list(classes) if classes else None,
    }
    if source is not None:
        found["source"] = {"file": source.name, "sha256": sha256_of(source)}
    return found


def build_described(about: Mapping, **settings) -> MsViT:
    """A fresh model; `settings` replace what the description says. CheckpointError for a
    description that is none of ours, or of a later version; ValueError for an unknown setting."""
    for name in settings:
        lookup(inspect.signature(MsViT).parameters, name, "setting of a model")
    try:
        if about["format"] > FORMAT:
            raise CheckpointError("the model was described by a later version of vil: update it")
        facts = dict(about["model"])
        facts |= settings
        model = MsViT(parse_arch(facts.pop("arch"), facts.pop("attention")), **facts)
        model.notes = {key: about[key] for key in ("transform", "classes") if about.get(key)}
        return model
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"no description of a model of ours: {error!r}") from None
