"""`vil.get_model`: a named architecture, with trained weights where they are asked for."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path

from vil.models.arch import parse_arch
from vil.models.registry import ARCHS, DEFAULTS, with_windows
from vil.models.vision_longformer import MsViT
from vil.pretrained.catalog import ViLWeights, by_model, get_model_weights, notes_of
from vil.pretrained.load_weights import classes_after, load_weights
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)
FILES = (".safetensors", ".pth", ".pt", ".tar", ".bin")


def get_model(
    name: str,
    *,
    weights: str | Path | ViLWeights | None = None,
    attention: str = "longformer",
    windows: int | Sequence[int] | None = None,
    head: str = "keep",
    rule: str = "linear",
    convert: bool = False,
    **kwargs,
) -> MsViT:
    """A named model; kwargs are MsViT's (img_size, num_classes, drop_path_rate, ...).

    weights: None for fresh ones; a member of `vil.get_model_weights(name)` or its name ("DEFAULT",
    "IMAGENET1K_V1"), whose image size, classes and windows are then the defaults; or a file: ours,
    or the 2021 reference's. attention: what stands where the architecture says local, by the rules
    of `parse_arch`. windows: the letter f of all stages or of each. head, rule, convert: what
    becomes of a head, of positions and of projections that do not fit, see `load_weights`.
    Raises ValueError for an unknown name and for another model's weights, CheckpointError for a
    file that does not fit.
    """
    stages = parse_arch(lookup(ARCHS, name, "model"), attention)
    for setting in kwargs:
        lookup(inspect.signature(MsViT).parameters, setting, "setting of a model")
    weights = _find(name, weights)
    settings = dict(DEFAULTS.get(name, {}))
    if isinstance(weights, ViLWeights):
        settings |= weights.meta["build"]
    settings |= kwargs if windows is None else {**kwargs, "windows": windows}
    model = MsViT(with_windows(name, stages, settings.pop("windows", None)), **settings)
    if weights is None:
        return model
    state = weights.get_state_dict() if isinstance(weights, ViLWeights) else weights
    report = load_weights(model, state, head=head, rule=rule, convert=convert)
    if report.resized:
        log.warning("%s: %d tables of positions resized", name, len(report.resized))
    if isinstance(weights, ViLWeights):
        notes = notes_of(weights)
        model.notes = notes | {"classes": classes_after(head, notes.get("classes"))}
    return model


def _find(name: str, weights: str | Path | ViLWeights | None) -> Path | ViLWeights | None:
    """A member of the model's weights, or a file."""
    if weights is None or isinstance(weights, Path):
        return weights
    known = by_model()[name].__members__ if name in by_model() else {}
    is_file = isinstance(weights, str) and (weights.endswith(FILES) or Path(weights).exists())
    if is_file and weights not in known:
        return Path(weights)
    kind = get_model_weights(name)
    if isinstance(weights, str):
        member = weights.removeprefix(f"{kind.__name__}.")
        return lookup(kind.__members__, member, f"weights of {name}")
    if not isinstance(weights, kind):
        raise ValueError(f"{weights!r} are weights of another model; {name} has {kind.__name__}")
    return weights
