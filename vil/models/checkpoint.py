"""Weight files: reading them safely, our names and the 2021 reference's, resizing, and a report.

Names are mapped exactly. What the reference stores besides weights (aliases of shared projections,
index buffers, tables it never used) is listed as ignored; whatever else is left over, absent or of
another size is an error unless the caller says otherwise.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vil.layers.attention.global_only import GlobalOnlyAttention
from vil.layers.attention.linformer import resize_projection
from vil.layers.attention.performer import PerformerAttention
from vil.layers.attention.srformer import SRAttention
from vil.layers.position import resize_table
from vil.models.foreign import head_names
from vil.models.msvit import MsViT
from vil.utils.errors import CheckpointError, of_torch_load

log = logging.getLogger(__name__)
MAX_LINES = 12
INDEX_BUFFERS = ("relative_position_index", "calls_since_last_redraw")
# what the reference stores twice when weights are shared: the copy -> its first name
ALIASES = {r"\b(query|kv|proj)_global\.": r"\1.", r"\bproj_v$": "proj_k"}
HEAD = ("head.weight", "head.bias")
# how a report has an embedding that the model would crop, and that is too short
CROPPED = re.compile(r"[xy]_pos_embed \(1, \d+, (\d+)\) -> \(1, \d+, \1\)$")


@dataclass
class Report:
    """What became of every key, in the file's names (`missing`, `fresh`: the model's)."""

    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)  # with both shapes; loaded too
    ignored: list[str] = field(default_factory=list)  # aliases, index buffers, unused tables
    fresh: list[str] = field(default_factory=list)  # kept as initialised, as the caller asked
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)  # of another shape, no rule to resize

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(keys)} {kind}" for kind, keys in vars(self).items() if keys)
        kinds = ("missing", "unexpected", "mismatched", "resized")
        listed = [kind for kind in kinds if getattr(self, kind)]
        lines = [counts or "nothing"]
        for kind in listed:
            keys, room = getattr(self, kind), MAX_LINES // len(listed)
            lines += [f"  {kind}: {key}" for key in keys[:room]]
            lines += [f"  ... and {len(keys) - room} more {kind}"] if len(keys) > room else []
        return "\n".join(lines)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, of a checkpoint folder of ours, or of a .pt/.pth file.

    A .pt file is read without unpickling objects; the reference's {net, arch, ...} and the usual
    {model, ...} and {state_dict, ...} are unwrapped, and a prefix `module.` that all keys share is
    dropped.
    Raises CheckpointError for a file that is absent, damaged, or holds anything but tensors.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"no weight file at {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that it then refuses
            found = (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(path, "cpu", weights_only=True)
            )
    except Exception as error:  # arbitrary bytes make torch's reader fail with anything
        reason = of_torch_load(error)
        raise CheckpointError(f"{path} is damaged or not a weight file: {reason}") from None
    for key in ("net", "model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(value, Tensor) for value in found.values())
    ):
        raise CheckpointError(f"{path} is not a state dict: it must map names to tensors")
    if all(key.startswith("module.") for key in found):
        found = {key.removeprefix("module."): value for key, value in found.items()}
    return found


def original_names(model: nn.Module) -> dict[str, str]:
    """For each entry of the model's state dict, its name in the 2021 reference.

    model: an MsViT; or an attention module, whose names are the reference's already.
    """
    return {name: _original_name(name) for name in model.state_dict()}


def load_original(
    module: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True
) -> Report:
    """Load weights with the reference's names into an MsViT or an attention module.

    Position tables of another size are resized by the reference's rules. strict: raise
    CheckpointError, with the report, if anything is missing, unexpected or of another shape.
    """
    return _load(module, state_dict, original_names(module), strict)


def load_weights(
    model: nn.Module, state_dict: Mapping[str, Tensor], *, head: str = "keep", strict: bool = True
) -> Report:
    """Load weights with the model's names or, into an MsViT, the reference's. See `load_original`.

    head: "keep" the file's head, which must have the model's classes; "new": leave the model's as
    initialised; "rows:FILE": take the rows of the file's head that FILE lists, one class index per
    line.
    """
    ours = isinstance(model, MsViT)
    original = ours and any(key.startswith("layer1.") for key in state_dict)
    names = original_names(model) if original else {name: name for name in model.state_dict()}
    heads = HEAD if ours else head_names(model)
    state_dict, fresh = _fit_head(dict(state_dict), head, heads)
    names = {o: t for o, t in names.items() if t not in fresh}
    report = _load(model, state_dict, names, strict, heads if head == "keep" else ())
    report.fresh = fresh
    if original:
        _warn_of_other_rules(model)
    if any("proj_k" in line for line in report.resized):
        log.warning(
            "linformer's projections were learnt for another grid: resized, to be fine-tuned"
        )
    return report


def _warn_of_other_rules(model: nn.Module) -> None:
    """The reference's weights were trained under rules that are defaults no longer."""
    for part in model.modules():
        if isinstance(part, PerformerAttention) and not part.fast_attention.batch_max:
            log.warning(
                "the 2021 performer took its key maximum over the batch: batch_max=True "
                "(PERFORMER_BATCH_MAX) gives its numbers"
            )
            return
        if isinstance(part, SRAttention) and part.ragged == "pad" and part.ratio > 1:
            log.warning(
                "the 2021 srformer dropped what the ratio does not divide: ragged='drop' "
                "(SR_RAGGED) gives its numbers"
            )
            return


def _original_name(name: str) -> str:
    match = re.match(r"stages\.(\d+)\.(embed|blocks\.(\d+))\.(.+)", name)
    if not match:
        return name
    layer, rest = f"layer{int(match[1]) + 1}", match[4].removeprefix("position.")
    if match[2] == "embed":
        return f"{layer}.0.{rest}"
    number = 2 * int(match[3]) + (1 if rest.startswith(("norm1", "attn")) else 2)
    return f"{layer}.{number}.{re.sub('^norm[12]', 'norm', rest)}"


def _load(
    module: nn.Module,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    strict: bool,
    heads: Sequence[str] = (),
) -> Report:
    """names: ours -> the file's. Nothing is changed in the module if strict loading fails.

    heads: the names whose size the caller may still choose to change.
    """
    report, target, fitted = Report(), module.state_dict(), {}
    for ours, theirs in names.items():
        if theirs not in state:
            report.missing.append(theirs)
            continue
        owner, _, leaf = ours.rpartition(".")
        value = _resized(module.get_submodule(owner), leaf, state[theirs], target[ours].shape)
        shapes = f"{theirs} {tuple(state[theirs].shape)} -> {tuple(target[ours].shape)}"
        if value is None:
            report.mismatched.append(shapes)
            continue
        fitted[ours] = value
        report.loaded.append(theirs)
        if value.shape != state[theirs].shape:
            report.resized.append(shapes)
    unused = _unused_tables(module)
    for key in state.keys() - set(names.values()):
        (report.ignored if _is_surplus(key, state, unused) else report.unexpected).append(key)
    report.unexpected.sort()
    report.ignored.sort()
    if strict and not report.complete:
        hint = _hint(report, heads)
        raise CheckpointError(f"the weights do not fit the model: {report}{hint}")
    with torch.no_grad():
        for ours, value in fitted.items():
            target[ours].copy_(value)
    return report


def _is_surplus(key: str, state: Mapping[str, Tensor], unused: set[str]) -> bool:
    """Whether a key has no weight of its own: index buffer, unused table, equal alias."""
    if key.endswith(INDEX_BUFFERS) or key in unused:
        return True
    twins = [re.sub(alias, name, key) for alias, name in ALIASES.items() if re.search(alias, key)]
    return any(twin in state and torch.equal(state[twin], state[key]) for twin in twins)


def _unused_tables(module: nn.Module) -> set[str]:
    """Bias tables the reference stored for global-memory attention, never read (its names)."""
    return {
        _original_name(f"{name}.local_relative_position_bias_table".removeprefix("."))
        for name, part in module.named_modules()
        if isinstance(part, GlobalOnlyAttention)
    }


def _resized(owner: nn.Module, leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """A value for the owner's parameter `leaf` in the wanted shape, None where that cannot be.

    Absolute embeddings are resized by their owner's rule. So are tables of positions, and
    linformer's projections: of square grids, as files do not say which.
    """
    if value.shape == shape:
        return value
    if leaf in ("x_pos_embed", "y_pos_embed") and value.ndim == 3 and value.shape[2] == shape[2]:
        crops_too_little = owner.resize == "crop" and shape[1] > value.shape[1]
        return None if crops_too_little else owner.fit(value.double(), shape[1])
    if value.ndim != 2 or value.shape[1:] != shape[1:]:
        return None
    if leaf == "local_relative_position_bias_table":
        old, new = _side(len(value)), _side(shape[0])
        return resize_table(value.double(), (old, old), (new, new)) if old and new else None
    if leaf in ("proj_k", "proj_v"):
        old, num_global = _side(len(value) - owner.num_global), owner.num_global
        if old:
            return resize_projection(value.double(), (old, old), owner.grid, num_global)
    return None


def _side(area: int) -> int:
    """The side of a square, 0 if it is none."""
    side = math.isqrt(max(area, 0))
    return side if side * side == area else 0


def _fit_head(
    state: dict[str, Tensor], head: str, names: Sequence[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with its head kept, taken out ("new"; its names come second) or cut to rows."""
    if head == "new":
        return {key: value for key, value in state.items() if key not in names}, list(names)
    if head.startswith("rows:"):
        found = [name for name in names if name in state]
        count = len(state[found[0]]) if found else 0
        rows = _read_rows(Path(head.removeprefix("rows:")), count)
        state |= {name: state[name][rows] for name in found}
    elif head != "keep":
        raise ValueError(f"the head must be keep, new or rows:FILE, got {head!r}")
    return state, []


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
    all_else = "\n  (another architecture: MODEL.ARCH, MSVIT.ARCH or ATTN_TYPE?)"
    if len(report.missing) > len(HEAD) < len(report.unexpected):
        return all_else
    if any(line.split(" ")[0] in heads for line in report.mismatched):
        return (
            "\n  (a head of another size: set DATA.NUM_CLASSES to its classes or, to train, "
            "FINETUNE.HEAD to new or rows:FILE)"
        )
    if report.missing or report.unexpected or not all(map(CROPPED.search, report.mismatched)):
        return all_else
    return "\n  (there is too little to crop: set MODEL.VIT.POS_RESIZE to interpolate)"
