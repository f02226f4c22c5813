"""Make model cards, which are JSON descriptions of models, and build models from them."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

import vil
from vil.models.arch import format_arch, format_attention, parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.card_schema import FORMAT, TRANSFORM
from vil.utils.atomic_write import sha256_of
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup


def make_model_card(
    model: MsViT,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    source: Path | None = None,
) -> dict:
    """Return a dict for JSON with the architecture, settings, input transform and class names of a
    model. `build_from_card` can rebuild the model, without its weights, from this dict.

    transform: settings mean, std, crop_pct and interpolation of the input transform, as in timm.
    classes: class names. Both default to the model's `notes`. source: the file that the weights
    come from; its name and SHA-256 are recorded. Raises ValueError for an unknown key in
    `transform`, a wrong number of class names, a head that is neither nn.Linear nor nn.Identity,
    and a global pooling that `from_pretrained` does not support.
    """
    transform = transform or model.notes.get("transform")
    classes = classes or model.notes.get("classes")
    if unknown := set(transform or {}) - set(TRANSFORM):
        raise ValueError(
            f"transform can have only {', '.join(TRANSFORM)}, got {', '.join(unknown)}"
        )
    if not isinstance(model.head, nn.Linear | nn.Identity):
        raise ValueError(
            f"the model's head must be one linear layer or none, got {type(model.head).__name__}"
        )
    num_classes = model.head.out_features if isinstance(model.head, nn.Linear) else 0
    if classes and len(classes) != num_classes:
        raise ValueError(
            f"the model has {num_classes} classes, but {len(classes)} class names are given"
        )
    if model.global_pool not in ("avg", "token"):
        raise ValueError(
            f"the model has timm's global_pool {model.global_pool!r}, which vil cannot load: "
            "save it with timm.models.save_for_hf instead"
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
    """Build a randomly initialized model from its model card.

    settings: arguments of MsViT that replace those in the card. Raises CheckpointError if the card
    does not describe a valid model, ValueError for an unknown setting.
    """
    for name in settings:
        lookup(inspect.signature(MsViT).parameters, name, "setting of a model")
    try:
        settings = dict(card["model"]) | settings
        model = MsViT(parse_arch(settings.pop("arch"), settings.pop("attention")), **settings)
        model.notes = {key: card[key] for key in ("transform", "classes") if card.get(key)}
        return model
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the model card describes no valid MsViT: {error!r}") from None
