"""The named models: architectures of arXiv:2103.15358, tables 1 and 9, the two in Swin's shape that
its authors published later, and a small one for the digits.
"""

import fnmatch
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vil.models.arch import StageSpec, parse_arch
from vil.models.checkpoint import classes_after, load_weights
from vil.models.msvit import MsViT
from vil.models.weights import ViLWeights, by_model, get_model_weights, notes_of
from vil.utils.table import lookup

log = logging.getLogger(__name__)
TINY = (
    "l1,h1,d48,n1,s1,g1,p4,f7,a{a}_l2,h3,d96,n1,s1,g1,p2,f7,a{a}_"
    "l3,h3,d192,n9,s0,g1,p2,f7,a{a}_l4,h6,d384,n1,s0,g0,p2,f7,a{a}"
)
DEEP = (
    "l1,h3,d96,n1,s1,g1,p4,f7,a{{a}}_l2,h3,d192,n{},s1,g1,p2,f7,a{{a}}_"
    "l3,h6,d384,n{},s0,g1,p2,f7,a{{a}}_l4,h12,d768,n1,s0,g0,p2,f7,a{{a}}"
)
MEDIUM_WIDE = (
    "l1,h3,d192,n1,s1,g1,p4,f7,a{a}_l2,h6,d384,n2,s1,g1,p2,f7,a{a}_"
    "l3,h8,d512,n8,s0,g1,p2,f7,a{a}_l4,h12,d768,n1,s0,g0,p2,f7,a{a}"
)
BASE_WIDE = (
    "l1,h3,d192,n1,s1,g1,p4,f8,a{a}_l2,h6,d384,n2,s1,g1,p2,f8,a{a}_"
    "l3,h12,d768,n8,s0,g1,p2,f7,a{a}_l4,h16,d1024,n1,s0,g0,p2,f7,a{a}"
)
FAMILY = {
    "vil_tiny": TINY,
    "vil_small": DEEP.format(2, 8),
    "vil_medium_deep": DEEP.format(4, 16),
    "vil_base_deep": DEEP.format(8, 24),
    "vil_medium_wide": MEDIUM_WIDE,
    "vil_base_wide": BASE_WIDE,
}
SWIN = (
    "l1,h3,d96,n2,s1,g1,p4,f7,a0_l2,h6,d192,n2,s1,g1,p2,f7,a0_"
    "l3,h12,d384,n{},s0,g1,p2,f7,a0_l4,h24,d768,n2,s0,g0,p2,f7,a0"
)
NANO = "l1,h1,d32,n1,s1,g1,p4,f4,a0_l2,h2,d64,n2,s1,g1,p2,f3,a0_l3,h4,d128,n1,s0,g1,p2,f3,a0"
# name -> ARCH; without suffix the absolute position embedding, `_rpb` the relative position bias
ARCHS = (
    {
        name + suffix: arch.format(a=absolute)
        for name, arch in FAMILY.items()
        for suffix, absolute in (("", 1), ("_rpb", 0))
    }
    | {"vil_swin_tiny_rpb": SWIN.format(6), "vil_swin_small_rpb": SWIN.format(18)}
    | {"vil_nano": NANO}
)
# what is not as in the paper: the small model for the digits
DEFAULTS = {"vil_nano": {"img_size": 64, "num_classes": 10, "avg_pool": True}}

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


def with_windows(
    name: str, stages: Sequence[StageSpec], windows: int | Sequence[int] | None
) -> list[StageSpec]:
    """The stages with windows of one size, or of each its own; None: those they have. ValueError
    for another number of windows than of stages."""
    if windows is None:
        return list(stages)
    windows = [windows] * len(stages) if isinstance(windows, int) else windows
    if len(windows) != len(stages):
        raise ValueError(f"{name} has {len(stages)} stages, but there are {len(windows)} windows")
    return [replace(stage, feature=size) for stage, size in zip(stages, windows)]


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


def list_models(pattern: str = "*") -> list[str]:
    """The names that match a wildcard pattern."""
    return fnmatch.filter(ARCHS, pattern)
