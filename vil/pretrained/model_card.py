"""Make model cards, which are JSON descriptions of models, and build models from them."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

import vil
from vil.models.arch import format_arch, format_attention, parse_arch
from vil.models.registry import ARCHS
from vil.models.vision_longformer import MsViT
from vil.ops.patterns import Pattern, parse_pattern
from vil.pretrained.card_schema import FORMAT, TRANSFORM
from vil.pretrained.state_dict_io import find_weights, read_metadata
from vil.utils.atomic_write import sha256_of
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup

# settings that `get_model_args` leaves out: `get_model` and timm have their own arguments for the
# first three, and the others only affect training
NOT_IN_MODEL_ARGS = {
    "arch", "in_chans", "num_classes", "grad_checkpoint",
    "drop_rate", "attn_drop_rate", "drop_path_rate",
}  # fmt: skip


def make_model_card(
    model: MsViT,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    task: Mapping | None = None,
    source: Path | None = None,
) -> dict:
    """Return a dict for JSON from which `build_from_card` can rebuild the model.

    The dict has the architecture, settings, input transform and class names, but no weights.

    transform: settings mean, std, crop_pct and interpolation of the input transform, as in timm,
    background, the color behind transparent pixels, and value_range, see DATA.VALUE_RANGE.
    classes: class names.
    task: what the outputs mean, if they are not the logits of one class per image: {"name": value
    of the config key TASK, "settings": {config key: its value}}.
    The defaults of `transform`, `classes` and `task` are in `model.notes`.
    source: the file of the weights. The card records its name and SHA-256.

    Raises ValueError for an unknown key in `transform`, a wrong number of class names, or if a card
    cannot represent the model's head, global pooling, a setting or an attention pattern.
    """
    transform = transform or model.notes.get("transform")
    classes, task = classes or model.notes.get("classes"), task or model.notes.get("task")
    if unknown := set(transform or {}) - set(TRANSFORM):
        raise ValueError(
            f"transform can have only the keys {', '.join(TRANSFORM)}, got {', '.join(unknown)}"
        )
    if not isinstance(model.head, nn.Linear | nn.Identity):
        raise ValueError(
            "the model's head must be nn.Linear or nn.Identity (no head), got "
            f"{type(model.head).__name__}"
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
    if task:
        card["task"] = dict(task)
    if source is not None:
        card["source"] = {"file": source.name, "sha256": sha256_of(source)}
    return json.loads(json.dumps(card, default=_pattern_text))


def _pattern_text(value: object) -> str:
    """Return the text of an attention pattern. Raises ValueError if the pattern cannot be recovered
    from its text, or if the value is not a pattern."""
    text = str(value) if isinstance(value, Pattern) else ""
    try:
        # in the argument of an attention, "/" separates the patterns of stages
        if text and "/" not in text and parse_pattern(text) == value:
            return text
    except ValueError:
        pass
    raise ValueError(
        f"the model cannot be saved, because a model card cannot contain the model's setting "
        f"{value!r:.100}: use a number or text for this setting"
    )


def read_card(name: str, path: Path) -> dict | None:
    """Read the model card in a weight file. Returns None if the file does not exist or has no card.

    path: path of the weight file, a checkpoint or a run, see `find_weights`. Raises CheckpointError
    if the card is invalid, or has other depths, widths, heads or patch sizes than the model `name`.
    """
    file = find_weights(path)
    card = read_metadata(file) if file.is_file() else None
    if card and _dimensions(card["model"]["arch"]) != _dimensions(ARCHS[name]):
        raise CheckpointError(
            f"{file} has weights of another architecture than {name}: load them with "
            f"vil.from_pretrained. Their architecture is {card['model']['arch']}"
        )
    return card


def _dimensions(arch: str) -> list[tuple[int, ...]]:
    return [(s.dim, s.num_heads, s.patch, len(s.attention)) for s in parse_arch(arch)]


def get_model_args(card: Mapping) -> dict:
    """Return the settings in a model card as keyword arguments of `vil.get_model`. Omits in_chans,
    num_classes and settings that only affect training, such as drop_rate (see
    NOT_IN_MODEL_ARGS)."""
    model = card["model"]
    stages = parse_arch(model["arch"], model["attention"])
    args = {key: value for key, value in model.items() if key not in NOT_IN_MODEL_ARGS}
    return args | {"windows": [stage.attn_size for stage in stages]}


def get_card_notes(card: Mapping) -> dict:
    """Return a model card's input transform, class names and task, as a dict for `MsViT.notes`."""
    return {key: card[key] for key in ("transform", "classes", "task") if card.get(key)}


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
        model.notes = get_card_notes(card)
        return model
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the model card does not describe a valid MsViT: {error!r}"
        ) from None
