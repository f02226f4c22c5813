"""Model cards: the architecture and settings of a model as JSON, and the model built from them."""

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


def make_model_card(
    model: MsViT,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    source: Path | None = None,
) -> dict:
    """Return a model's architecture, settings, input transform and class names.

    transform: mean, std, crop_pct and interpolation, named as in timm. classes: class names. Both
    default to the model's `notes`. source: file that the weights come from, recorded with its
    SHA-256.
    Raises ValueError for an unknown key in transform, a wrong number of class names, a head that is
    not one linear layer, and a global pool that `from_pretrained` does not know.
    """
    transform = transform or model.notes.get("transform")
    classes = classes or model.notes.get("classes")
    if unknown := set(transform or {}) - set(TRANSFORM):
        raise ValueError(f"transform can have {', '.join(TRANSFORM)}: not {', '.join(unknown)}")
    if not isinstance(model.head, nn.Linear | nn.Identity):
        raise ValueError(f"the head must be one linear layer or none: {type(model.head).__name__}")
    num_classes = model.head.out_features if isinstance(model.head, nn.Linear) else 0
    if classes and len(classes) != num_classes:
        raise ValueError(f"{len(classes)} names for {num_classes} classes")
    if model.global_pool not in ("avg", "token"):
        raise ValueError(
            f"global_pool {model.global_pool!r} is timm's: save it by timm.models.save_for_hf"
        )
    stages = {"arch": format_arch(model.specs), "attention": format_attention(model.specs)}
    card = {
        "format": FORMAT,
        "version": vil.__version__,
        "model": {**stages, **model.settings, "num_classes": num_classes},
        "transform": dict(transform) if transform else None,
        "classes": list(classes) if classes else None,
    }
    if source is not None:
        card["source"] = {"file": source.name, "sha256": sha256_of(source)}
    return card


def build_from_card(card: Mapping, **settings) -> MsViT:
    """Build a model with fresh weights; `settings` override the card's.

    Raises CheckpointError for a card that is malformed or of a later version, ValueError for an
    unknown setting.
    """
    for name in settings:
        lookup(inspect.signature(MsViT).parameters, name, "setting of a model")
    try:
        if card["format"] > FORMAT:
            raise CheckpointError("the model was saved by a later version of vil: update it")
        settings = dict(card["model"]) | settings
        model = MsViT(parse_arch(settings.pop("arch"), settings.pop("attention")), **settings)
        model.notes = {key: card[key] for key in ("transform", "classes") if card.get(key)}
        return model
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"not the model card of an MsViT: {error!r}") from None
