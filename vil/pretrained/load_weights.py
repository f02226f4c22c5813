"""Loading weights: our names and the 2021 reference's, resizing, heads, and a report of every key.

What the reference stores besides weights (aliases of shared projections, index buffers, tables it
never used) is listed as ignored, and so is all of a detector but its backbone; whatever else is
left over, absent or of another size is an error unless the caller says otherwise.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vil.layers.pos_embed import RULES
from vil.models.head_names import head_names
from vil.models.vision_longformer import MsViT
from vil.pretrained.convert_2021 import (
    PROJECTION,
    backbone_of,
    convert_projections,
    is_original,
    is_surplus,
    original_names,
    unused_tables,
    warn_of_other_rules,
)
from vil.pretrained.resize_pos import repeated, resized
from vil.pretrained.state_dict_io import read_weights, unwrap
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)
MAX_LINES = 12
HEAD = ("head.weight", "head.bias")
# how a report has an embedding that the model would crop, and that is too short
CROPPED = re.compile(r"[xy]_pos_embed \(1, \d+, (\d+)\) -> \(1, \d+, \1\)$")
LISTED = ("missing", "unexpected", "mismatched", "resized", "converted")


@dataclass
class Report:
    """What became of every key, in the file's names (`missing`, `fresh`: the model's)."""

    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)  # with both shapes; loaded too
    converted: list[str] = field(default_factory=list)  # made of other projections; loaded too
    ignored: list[str] = field(default_factory=list)  # aliases, index buffers, a detector's rest
    fresh: list[str] = field(default_factory=list)  # kept as initialised, as the caller asked
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)  # of another shape, no rule to resize

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(keys)} {kind}" for kind, keys in vars(self).items() if keys)
        listed = [kind for kind in LISTED if getattr(self, kind)]
        lines = [counts or "nothing"]
        for kind in listed:
            keys, room = getattr(self, kind), MAX_LINES // len(listed)
            lines += [f"  {kind}: {key}" for key in keys[:room]]
            lines += [f"  ... and {len(keys) - room} more {kind}"] if len(keys) > room else []
        return "\n".join(lines)


def load_original(
    module: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True, rule: str = "linear"
) -> Report:
    """Load weights with the reference's names into an MsViT or an attention module.

    Weights of a detector: its backbone. Position tables of another size are resized by the
    reference's rule, "bicubic" or "extend". strict: raise CheckpointError, with the report, if
    anything is missing, unexpected or of another shape.
    """
    state, rest = backbone_of(state_dict)
    report = _load(module, state, original_names(module), strict, (), rule)
    report.ignored += rest
    return report


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    head: str = "keep",
    strict: bool = True,
    rule: str = "linear",
    convert: bool = False,
) -> Report:
    """Load weights with the model's names or, into an MsViT, the reference's. See `load_original`.

    weights: a state dict, or the file it is in. head: "keep" the file's head, which must have the
    model's classes; "new": leave the model's as initialised; "rows:FILE": take the rows of the
    file's head that FILE lists, one class index per line. convert: put full attention's projections
    into longformer's, and the other way round, and repeat a single global token; the model is then
    another one, to be fine-tuned.
    """
    lookup(RULES, rule, "rule of resizing")
    state = read_weights(weights) if isinstance(weights, str | Path) else unwrap(weights)
    model = getattr(model, "_orig_mod", model)  # that torch.compile wraps
    ours, rest = isinstance(model, MsViT), []
    if ours:
        state, rest = backbone_of(state)
    names = names_in(model, state)
    heads = HEAD if ours else head_names(model)
    state, fresh = _fit_head(dict(state), head, heads)
    names = {o: t for o, t in names.items() if t not in fresh}
    report = _load(model, state, names, strict, heads if head == "keep" else (), rule, convert)
    report.fresh = fresh
    report.ignored += rest
    log.debug("weights: %s", report)
    if ours and is_original(state):
        warn_of_other_rules(model)
    if report.converted:
        log.warning("projections converted from another attention: to be fine-tuned")
    if any("proj_k" in line for line in report.resized):
        log.warning(
            "linformer's projections were learnt for another grid: resized, to be fine-tuned"
        )
    return report


def compare(module: nn.Module, state_dict: Mapping[str, Tensor]) -> Report:
    """What `load_weights` would report, strict or not; nothing is loaded."""
    state, _ = backbone_of(state_dict)
    return _fit(module, state, names_in(module, state), "linear")[1]


def translate(
    model: nn.Module, state_dict: Mapping[str, Tensor], *, rule: str = "linear"
) -> dict[str, Tensor]:
    """A state dict, ours or the reference's, under the model's names and in its sizes, as far as
    there is a rule for them; the rest is left as it is, for others to fit or to refuse."""
    state, _ = backbone_of(state_dict)
    names = names_in(model, state)
    fitted, report = _fit(model, state, names, rule)
    ours = {theirs: name for name, theirs in names.items()}
    left = {ours.get(k, k): v for k, v in state.items() if k not in report.ignored}
    return left | fitted


def names_in(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The model's names -> those of the state: the reference's, or the same."""
    if isinstance(model, MsViT) and is_original(state):
        return original_names(model)
    return {name: name for name in model.state_dict()}


def _load(
    module: nn.Module,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    strict: bool,
    heads: Sequence[str],
    rule: str,
    convert: bool = False,
) -> Report:
    """names: ours -> the file's. Nothing is changed in the module if strict loading fails.

    heads: the names whose size the caller may still choose to change.
    """
    fitted, report = _fit(module, state, names, rule, convert)
    if strict and not report.complete:
        hint = _hint(report, heads)
        raise CheckpointError(f"the weights do not fit the model: {report}{hint}")
    target = module.state_dict()
    with torch.no_grad():
        for ours, value in fitted.items():
            target[ours].copy_(value)
    return report


def _fit(
    module: nn.Module,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    rule: str,
    convert: bool = False,
) -> tuple[dict[str, Tensor], Report]:
    """What fits, under our names, and the report."""
    report, target, fitted, given = Report(), module.state_dict(), {}, state
    if convert:
        state, report.converted = convert_projections(state, names.values())
    for ours, theirs in names.items():
        if theirs not in state:
            report.missing.append(theirs)
            continue
        owner, _, leaf = ours.rpartition(".")
        shape = target[ours].shape
        part = module.get_submodule(owner)
        value = resized(part, leaf, state[theirs], shape, rule)
        value = repeated(leaf, state[theirs], shape) if value is None and convert else value
        shapes = f"{theirs} {tuple(state[theirs].shape)} -> {tuple(shape)}"
        if value is None:
            report.mismatched.append(shapes)
            continue
        fitted[ours] = value.to(state[theirs].dtype)
        report.loaded.append(theirs)
        if value.shape != state[theirs].shape:
            report.resized.append(shapes)
    unused = unused_tables(module)
    for key in state.keys() - set(names.values()):
        (report.ignored if is_surplus(key, given, unused) else report.unexpected).append(key)
    report.unexpected.sort()
    report.ignored.sort()
    return fitted, report


def _fit_head(
    state: dict[str, Tensor], head: str, names: Sequence[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with its head kept, taken out ("new"; its names come second) or cut to rows."""
    if head == "new":
        return {key: value for key, value in state.items() if key not in names}, list(names)
    if head.startswith("rows:"):
        found = [name for name in names if name in state]
        if not found:
            raise CheckpointError(f"head {head}: the file has no head to take rows of")
        count = len(state[found[0]])
        rows = _read_rows(Path(head.removeprefix("rows:")), count)
        state |= {name: state[name][rows] for name in found}
    elif head != "keep":
        raise ValueError(f"the head must be keep, new or rows:FILE, got {head!r}")
    return state, []


def classes_after(head: str, classes: Sequence[str] | None) -> list[str] | None:
    """The names of a file's classes as `load_weights` leaves its head; none for a new one."""
    if not classes or head == "new":
        return None
    if head.startswith("rows:"):
        return [classes[row] for row in _read_rows(Path(head.removeprefix("rows:")), len(classes))]
    return list(classes)


def _read_rows(path: Path, count: int) -> Sequence[int]:
    if not path.is_file():
        raise CheckpointError(f"rows of the head: there is no {path}")
    try:
        rows = [int(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"rows of the head: {path} must hold one class index per line ({error})"
        ) from None
    if not rows or min(rows) < 0 or max(rows) >= count:
        raise CheckpointError(
            f"rows of the head: {path} must hold indices of the file's {count} classes"
        )
    return rows


def _hint(report: Report, heads: Sequence[str]) -> str:
    """What may be the matter: the head alone, or the map, or all of it."""
    nothing = "" if report.loaded else ", not one name fits"
    all_else = f"\n  (another architecture{nothing}: MODEL.ARCH, MSVIT.ARCH or ATTN_TYPE?)"
    names = report.missing + report.unexpected
    if names and all(map(PROJECTION.fullmatch, names)):
        all_else += "\n  (full and longformer attention go into each other by vil convert)"
    if len(report.missing) > len(HEAD) < len(report.unexpected):
        return all_else
    surplus = report.unexpected and not report.missing and set(report.unexpected) <= set(heads)
    if surplus or any(line.split(" ")[0] in heads for line in report.mismatched):
        return (
            "\n  (a head of another size: set DATA.NUM_CLASSES to its classes or, to train, "
            "FINETUNE.HEAD to new or rows:FILE; in Python num_classes, head='new')"
        )
    if report.missing or report.unexpected or not all(map(CROPPED.search, report.mismatched)):
        return all_else
    return "\n  (there is too little to crop: set MODEL.VIT.POS_RESIZE to interpolate)"
