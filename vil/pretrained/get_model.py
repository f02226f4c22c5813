"""Build a named model, with pretrained weights if requested (`vil.get_model`)."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path

from vil.models.arch import parse_arch
from vil.models.registry import ARCHS, DEFAULTS, replace_windows
from vil.models.vision_longformer import MsViT
from vil.pretrained.catalog import ViLWeights, get_model_weights, get_notes, weight_classes_by_model
from vil.pretrained.load_weights import load_weights, select_classes
from vil.pretrained.model_card import get_card_notes, get_model_args, read_card
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)
FILES = (".safetensors", ".pth", ".pt", ".tar", ".bin")


def get_model(
    name: str,
    *,
    weights: str | Path | ViLWeights | None = None,
    attention: str | None = None,
    windows: int | Sequence[int] | None = None,
    head: str = "keep",
    rule: str = "linear",
    convert: bool = False,
    **kwargs,
) -> MsViT:
    """Build a model by its name, such as "vil_tiny".

    name: one of `vil.list_models()`.
    weights: None (random initialization), published weights, or a file that `load_weights` can
      read. Published weights are given as a member of `vil.get_model_weights(name)`, or as the name
      of a member, such as "DEFAULT". Settings that are not passed here, such as the image size
      and windows, are those of the published weights or of the file's model card. Exceptions are
      dropout rates, gradient checkpointing and, with `convert`, the attention.
    attention: name of the attention type of the stages without full attention, such as "linformer",
      or a string with a name for each block, see vil/models/arch.py. Default: "longformer".
    windows: side of longformer's window in tokens, or the size parameter of another attention type.
      One number applies to all stages. A list has a number for each stage.
    head, rule, convert: see `load_weights`. They adapt weights that differ from the model: `head`
      in the number of classes, `rule` in the size of position embeddings, `convert` in attention.
    kwargs: arguments of MsViT, such as img_size, num_classes and drop_path_rate.

    Raises ValueError for an unknown name and for weights of another model, CheckpointError for a
    file that does not fit the model.
    """
    arch = lookup(ARCHS, name, "model")
    weights = _resolve_weights(name, weights)
    described, notes = _describe_weights(name, weights)
    if convert:
        described.pop("attention", None)
    given = {"attention": attention, "windows": windows}
    given = {key: value for key, value in given.items() if value is not None}
    settings = {"attention": "longformer", **DEFAULTS.get(name, {}), **described, **given, **kwargs}
    stages = parse_arch(arch, settings.pop("attention"))
    stages = replace_windows(name, stages, settings.pop("windows", None))
    for setting in settings:
        lookup(inspect.signature(MsViT).parameters, setting, "setting of a model")
    model = MsViT(stages, **settings)
    if weights is None:
        return model
    state = weights.get_state_dict() if isinstance(weights, ViLWeights) else weights
    report = load_weights(model, state, head=head, rule=rule, convert=convert)
    if report.resized:
        log.warning("%s: resized %d position embeddings", name, len(report.resized))
    if notes:
        model.notes = notes | {"classes": select_classes(head, notes.get("classes"))}
    return model


def _describe_weights(name: str, weights: Path | ViLWeights | None) -> tuple[dict, dict]:
    """Return (settings, notes). settings: arguments of `get_model` that fit the weights. notes: the
    value of `MsViT.notes`. Both are {} if `weights` is None or a file without a model card."""
    if isinstance(weights, ViLWeights):
        return dict(weights.meta["build"]), get_notes(weights)
    card = None if weights is None else read_card(name, weights)
    if card is None:
        return {}, {}
    counts = {key: card["model"][key] for key in ("in_chans", "num_classes")}
    return get_model_args(card) | counts, get_card_notes(card)


def _resolve_weights(
    name: str, weights: str | Path | ViLWeights | None
) -> Path | ViLWeights | None:
    """Convert the argument `weights` of `get_model` to a member of the model's weight enum, the
    path of a file, or None. Raises ValueError if `weights` is not valid for the model `name`."""
    if weights is None or isinstance(weights, Path):
        return weights
    known = weight_classes_by_model()[name].__members__ if name in weight_classes_by_model() else {}
    is_file = isinstance(weights, str) and (weights.endswith(FILES) or Path(weights).exists())
    if is_file and weights not in known:
        return Path(weights)
    cls = get_model_weights(name)
    if isinstance(weights, str):
        member = weights.removeprefix(f"{cls.__name__}.")
        return lookup(cls.__members__, member, f"weights of {name}")
    if not isinstance(weights, cls):
        raise ValueError(f"{weights!r} is for another model: use a member of {cls.__name__}")
    return weights
