"""Load weights into models and report what happened to each key.

State dicts have the key names of vil or of the original Vision Longformer code (2021). Position
embeddings are resized. The head is loaded, replaced, or reduced to selected classes. By default, an
error is raised if a key is missing, unexpected or of another shape. Keys that are known to be
unneeded raise no error and are reported as ignored, such as those of a detector outside of its
backbone.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vil.layers.pos_embed import RULES
from vil.models.head_names import find_head_names
from vil.models.vision_longformer import MsViT
from vil.pretrained.adapt_stem import adapt_stem, find_stems
from vil.pretrained.convert_2021 import (
    PROJECTION,
    convert_projections,
    extract_backbone,
    find_unused_tables,
    get_2021_names,
    has_2021_names,
    is_redundant,
    use_2021_rules,
)
from vil.pretrained.state_dict_io import find_weights, read_metadata, read_weights, unwrap
from vil.pretrained.student import extract_student
from vil.pretrained.timm_weights import fit_timm
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)
MAX_LINES = 12
HEAD = ("head.weight", "head.bias")
# prefixes of the names of the network's parameters, in a detector and in a segmentation model
BODIES = ("backbone.body.", "body.")
# report line of an embedding that is too short to crop
CROPPED = re.compile(r"[xy]_pos_embed \(1, \d+, (\d+)\) -> \(1, \d+, \1\)$")
# parameters of global tokens -> dimensions of size G
GLOBAL = {
    "cls_token": (1,),
    "cls_pos_embed": (1,),
    "g2l_relative_position_bias": (2,),
    "g2g_relative_position_bias": (1, 2),
}
LISTED = ("missing", "unexpected", "mismatched", "resized", "converted", "adapted")


@dataclass
class Report:
    """Report of what happened to each key of a state dict that was loaded into a model.

    The keys in `missing`, `unexpected` and `mismatched` do not fit the model.
    """

    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)  # "key shape -> shape"; also in `loaded`
    converted: list[str] = field(default_factory=list)  # from other projections; also in `loaded`
    adapted: list[str] = field(default_factory=list)  # stem for other channels; also in `loaded`
    ignored: list[str] = field(default_factory=list)  # aliases, index buffers, parts of a detector
    fresh: list[str] = field(default_factory=list)  # left as initialized, on request
    missing: list[str] = field(default_factory=list)  # in the model, not in the state dict
    unexpected: list[str] = field(default_factory=list)  # in the state dict, not in the model
    mismatched: list[str] = field(default_factory=list)  # of another shape that no rule resizes

    @property
    def complete(self) -> bool:
        """Whether no key is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        return "\n  ".join(self.lines())

    def one_line(self) -> str:
        """Format the report as one line of text, for error messages."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Format the report as lines of text: the number of keys in each field, then one line for
        each key that the user may have to check, such as a missing key. Long lists of keys are
        truncated."""
        counts = ", ".join(f"{len(keys)} {kind}" for kind, keys in vars(self).items() if keys)
        listed = [kind for kind in LISTED if getattr(self, kind)]
        lines = [counts or "nothing"]
        for kind in listed:
            keys, limit = getattr(self, kind), MAX_LINES // len(listed)
            lines += [f"{kind}: {key}" for key in keys[:limit]]
            if len(keys) > limit:
                lines.append(f"and {len(keys) - limit} more {kind}")
        return lines


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    head: str = "keep",
    strict: bool = True,
    rule: str = "linear",
    convert: bool = False,
) -> Report:
    """Load weights into a model. An MsViT also accepts weights of the original 2021 code.

    weights: a state dict or a file. A relative position table of another length is taken to be of
    square images, except that a file with a model card says their size.
    strict: raise CheckpointError if a key is missing, unexpected or of another shape.
    rule: how to resize position embeddings. "linear" is bilinear without aligned corners, as in the
    2021 code. "bicubic" is antialiased: sharper when enlarging, without aliasing when shrinking.
    "extend" keeps the value of each relative position; use it if the window changes and the image
    size does not.
    head: "keep" loads the head of `weights`, which must match the model's classes. "new" keeps the
    model's initial head. "rows:FILE" loads only some rows of the head of `weights`: FILE lists
    their class indices, one per line.
    convert: convert projections between full and longformer attention. If the weights have one
    global token and the model has several, repeat the token. A converted model gives other outputs
    and must be fine-tuned.
    Returns a report of what happened to each key. Raises CheckpointError if a file cannot be read,
    or if a weight is NaN or infinite.
    """
    lookup(RULES, rule, "rule of resizing")
    model = getattr(model, "_orig_mod", model)  # wrapped by torch.compile
    if size := _find_other_size(model, weights):
        own, options = model.settings["img_size"], dict(strict=strict, rule=rule, convert=convert)
        model.set_input_size(size, rule)
        try:
            report = load_weights(model, read_weights(weights), head=head, **options)
        finally:
            model.set_input_size(own, rule)
        report.resized.append(f"all from images of {size} to {own} pixels (height, width)")
        return report
    state = read_weights(weights) if isinstance(weights, str | Path) else unwrap(weights)
    state, projectors = extract_student(state)
    is_msvit, ignored, given = isinstance(model, MsViT), [], state
    if is_msvit:
        state, ignored = extract_backbone(state)
    else:
        state = fit_timm(model, state)
    names = map_names(model, state)
    heads = HEAD if is_msvit else find_head_names(model)
    state, fresh = _fit_head(dict(state), head, heads)
    names = {name: key for name, key in names.items() if key not in fresh}
    fitted, report = _fit(model, state, names, rule, convert)
    _copy(model, fitted, report, strict, heads if head == "keep" else ())
    report.fresh = fresh
    report.resized += [
        f"{key} {tuple(given[key].shape)} -> {tuple(value.shape)}"
        for key, value in state.items()
        if key in given and given[key].shape != value.shape
    ]
    report.ignored += ignored + projectors
    log.debug("weights: %s", report)
    if is_msvit and has_2021_names(state):
        use_2021_rules(model)
    if report.converted:
        log.warning("projections were converted from another attention type: fine-tune the model")
    if any("proj_k" in line for line in report.resized):
        log.warning("linformer's projections were resized from another grid: fine-tune the model")
    return report


def _find_other_size(model: nn.Module, weights: object) -> tuple[int, int] | None:
    """Return the image size in the model card of a weight file if it differs from that of the model
    and one of them is not square, and otherwise None. Tables are then resized from one size to the
    other, because the sides of a table do not follow from its number of entries."""
    if not isinstance(model, MsViT) or not isinstance(weights, str | Path):
        return None
    file = find_weights(Path(weights))
    card = read_metadata(file) if file.is_file() else None
    if card is None:
        return None
    own = tuple(to_2tuple(model.settings["img_size"]))
    size = tuple(to_2tuple(card["model"].get("img_size", own)))
    return size if size != own and (len({*size}) > 1 or len({*own}) > 1) else None


def compare(module: nn.Module, state_dict: Mapping[str, Tensor]) -> Report:
    """Return a report of what would happen to each key of a state dict if it were loaded into a
    model. Nothing is loaded, and keys that do not fit raise no error."""
    return _fit(module, state_dict, map_names(module, state_dict), "linear")[1]


def translate(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict to the key names of a model and, where possible, to its shapes.

    Tensors that do not fit and cannot be resized are returned unchanged, and the caller must handle
    them.
    """
    names = map_names(model, state)
    fitted, report = _fit(model, state, names, "linear")
    to_model = {key: name for name, key in names.items()}
    rest = {to_model.get(k, k): v for k, v in state.items() if k not in report.ignored}
    return rest | fitted


def map_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name in the model's state dict: name of the same tensor in `state`}.

    The names differ only if `state` is from the original 2021 code.
    """
    if isinstance(model, MsViT) and has_2021_names(state):
        return get_2021_names(model)
    return {name: name for name in model.state_dict()}


def _copy(
    module: nn.Module,
    fitted: Mapping[str, Tensor],
    report: Report,
    strict: bool,
    heads: Sequence[str] = (),
) -> None:
    """Copy the weights `fitted` into a module.

    fitted, report: results of `_fit`. heads: names of the head's parameters. If they do not fit,
    the error tells the user how to choose the head's size. Empty: it does not.
    Raises CheckpointError, before anything is copied, if a parameter is not finite, or if `strict`
    is set and some weights do not fit.
    """
    if strict and not report.complete:
        raise CheckpointError(
            f"the weights do not fit the model: {report.one_line()}; likely cause: "
            f"{_hint(report, heads)}"
        )
    parameters = dict(module.named_parameters())  # buffers may be infinite, such as masks
    for name in fitted.keys() & parameters:
        if not fitted[name].is_meta and not fitted[name].isfinite().all():
            raise CheckpointError(f"the weights are not finite: {name} has NaN or infinite values")
    target = module.state_dict()
    with torch.no_grad():
        for name, value in fitted.items():
            target[name].copy_(value)


def _fit(
    module: nn.Module,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    rule: str,
    convert: bool = False,
) -> tuple[dict[str, Tensor], Report]:
    """Resize and convert the weights in a state dict to fit a module.

    names: {name in the module: name in `state`}. rule, convert: see `load_weights`. Returns
    (fitted, report). fitted: {name in the module: weight} for the weights that fit. report: what
    happened to each key.
    """
    report, target, fitted, original = Report(), module.state_dict(), {}, state
    stems = find_stems(module)
    if convert:
        state, report.converted = convert_projections(state, names.values())
    for name, key in names.items():
        if key not in state:
            report.missing.append(key)
            continue
        path, _, leaf = name.rpartition(".")
        value, shape, owner = state[key], target[name].shape, module.get_submodule(path)
        shapes = f"{key} {tuple(value.shape)} -> {tuple(shape)}"
        if value.shape != shape:
            resize = getattr(owner, "resize_weight", lambda *_: None)
            value = resize(leaf, value, shape, rule)
        if value is None and name in stems:
            value = adapt_stem(state[key], shape)
        if value is None and convert:
            value = _repeat_global(leaf, state[key], shape)
        if value is None:
            report.mismatched.append(shapes)
            continue
        fitted[name] = value.to(state[key].dtype)
        report.loaded.append(key)
        if name in stems and value.shape != state[key].shape:
            counts = f"{state[key].shape[1]} to {value.shape[1]} channels"
            report.adapted.append(f"{key}: stem adapted from {counts}")
        elif value.shape != state[key].shape:
            report.resized.append(shapes)
    unused = find_unused_tables(module)
    for key in state.keys() - set(names.values()):
        (report.ignored if is_redundant(key, original, unused) else report.unexpected).append(key)
    report.unexpected.sort()
    report.ignored.sort()
    return fitted, report


def _repeat_global(leaf: str, value: Tensor, shape: torch.Size) -> Tensor | None:
    """Repeat a parameter of a model with one global token for a model with several.

    Returns None for any other parameter.

    leaf: last component of the parameter's name. value: the parameter. shape: the shape to return.
    """
    if leaf not in GLOBAL or value.ndim != len(shape) or not shape.numel():
        return None
    single = [1 if dim in GLOBAL[leaf] else size for dim, size in enumerate(shape)]
    return value.expand(shape) if list(value.shape) == single else None


def _fit_head(
    state: dict[str, Tensor], head: str, names: Sequence[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Remove the head's weights from a state dict if `head` is "new". If `head` is "rows:FILE",
    select rows of these weights.

    head: see `load_weights`. names: names of the head's parameters. Returns (state dict, names of
    the parameters that keep their initial values).
    """
    if head == "new":
        return {key: value for key, value in state.items() if key not in names}, list(names)
    if head.startswith("rows:"):
        present = [name for name in names if name in state]
        if not present:
            raise CheckpointError(
                f"head={head!r} selects rows of the head, but these weights have no head"
            )
        rows = _read_rows(head, len(state[present[0]]))
        state |= {name: state[name][rows] for name in present}
    elif head != "keep":
        raise ValueError(f'head must be "keep", "new" or "rows:FILE", got {head!r}')
    return state, []


def select_classes(head: str, classes: Sequence[str] | None) -> list[str] | None:
    """Return the class names that remain after `load_weights` has applied the option `head`.

    classes: class names of the file's head, or None. Returns None if `head` is "new" or if
    `classes` is None or empty.
    """
    if not classes or head == "new":
        return None
    if head.startswith("rows:"):
        return [classes[row] for row in _read_rows(head, len(classes))]
    return list(classes)


def _read_rows(head: str, count: int) -> Sequence[int]:
    """Read class indices from a file. head: "rows:" and the path of the file. Raises
    CheckpointError if the file has no indices, or an index that is not in 0 to `count` - 1."""
    path = Path(head.removeprefix("rows:"))
    if not path.is_file():
        raise CheckpointError(f"head=rows:{path}: there is no such file")
    reason = f"class indices from 0 to {count - 1}"
    try:
        rows = [int(line) for line in path.read_text().split()]
        if rows and min(rows) >= 0 and max(rows) < count:
            return rows
    except (OSError, ValueError) as error:
        reason = f"one class index per line ({error})"
    raise CheckpointError(f"head=rows:{path}: the file must contain {reason}")


def _hint(report: Report, heads: Sequence[str]) -> str:
    """Return the end of an error message: the likely reason why weights do not fit, and what to do.
    heads: names of the head's parameters."""
    nothing = "" if report.loaded else ", no name matches"
    other_arch = f"another architecture{nothing}: check MODEL.ARCH, MSVIT.ARCH and ATTN_TYPE"
    names = report.missing + report.unexpected
    if any(name.startswith(BODIES) for name in report.unexpected):
        return (
            "a detector or segmentation model, from which only another one can start: start both "
            "from the same classifier"
        )
    if names and all(map(PROJECTION.fullmatch, names)):
        other_arch += "; vil convert converts between full and longformer attention"
    if len(report.missing) > len(HEAD) < len(report.unexpected):
        return other_arch
    surplus = report.unexpected and not report.missing and set(report.unexpected) <= set(heads)
    if surplus or any(line.split(" ")[0] in heads for line in report.mismatched):
        return (
            "a head of another size: set DATA.NUM_CLASSES to the weights' number of classes or, to "
            "train, FINETUNE.HEAD to new or rows:FILE; in Python, pass num_classes or head='new'"
        )
    if set(report.missing) == set(heads) and not report.unexpected:
        return (
            "a file without a head: set FINETUNE.HEAD to new to train one; in Python, pass "
            "head='new'"
        )
    if report.missing or report.unexpected or not all(map(CROPPED.search, report.mismatched)):
        return other_arch
    return "position embeddings are too short to crop: set MODEL.VIT.POS_RESIZE to interpolate"
