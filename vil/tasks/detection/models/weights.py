"""Load a weight file into a detector, or into its body (the network before the feature pyramid)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from vil.models.head_names import find_head_names
from vil.pretrained.body_weights import load_body
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.tasks.detection.models.detectors import BODY
from vil.utils.errors import CheckpointError


def load_detector(
    model: nn.Module, path: Path, *, head: str = "keep", rule: str = "linear", strict: bool = False
) -> Report:
    """Load a weight file into a detector, and return a report of what was loaded.

    A file of another model, such as a classifier, is loaded only into the detector's body, the
    network before the feature pyramid.

    Args:
        head: "keep" to load everything. "new" to leave the layers that depend on the number of
            categories as initialized, and the parts that the file's detector does not have or has
            in another form, such as the mask head if it predicts only boxes.
        rule: method for resizing position embeddings and bias tables, see `load_weights`.
        strict: raise CheckpointError if only the body would be loaded, with random heads.

    Raises CheckpointError if the weights do not fit the model, and ValueError for any other value
    of `head`. Detectors do not support "rows:FILE".
    """
    if head not in ("keep", "new"):
        raise ValueError(
            f"FINETUNE.HEAD is {head!r}, but detectors support only 'keep' and 'new': use one of "
            "these"
        )
    state = read_weights(path)
    if any(name.startswith(BODY) for name in state):
        if head == "new":
            return _load_parts(model, state, rule)
        if any(not name.startswith(BODY) for name in model.state_dict().keys() ^ state.keys()):
            raise CheckpointError(
                f"{path} is of another kind of detector: set DETECTION.MODEL, HEADS and FPN as it "
                "has them or, to train, FINETUNE.HEAD to new, which loads the parts that both have"
            )
        return load_weights(model, state, rule=rule)
    if strict:
        raise CheckpointError(
            f"{path} has no weights for the heads of a detector, so the heads would be random: use "
            "the file only to start a training (vil train)"
        )
    return load_body(model.backbone.body, state, rule)


def _load_parts(model: nn.Module, state: dict[str, Tensor], rule: str) -> Report:
    """Load the body, and each part of the heads and of the pyramid that the file has with the same
    names and shapes, except the layers that depend on the number of categories."""
    heads, own = find_head_names(model), model.state_dict()
    ours, theirs = (_find_parts(weights, heads) for weights in (own, state))
    shared = {part for part, shapes in ours.items() if theirs.get(part) == shapes}
    kept = {name: v for name, v in state.items() if name.startswith(BODY) or _part(name) in shared}
    fresh = {name: v for name, v in own.items() if not (name.startswith(BODY) or name in kept)}
    report = load_weights(model, kept | fresh, head="new", rule=rule)
    report.loaded = [name for name in report.loaded if name not in fresh]
    report.fresh = sorted(fresh.keys() | report.fresh)
    report.ignored += sorted(state.keys() - kept.keys())
    return report


def _find_parts(state: Mapping[str, Tensor], heads: Sequence[str]) -> dict[str, dict]:
    """Return {part: {name of a parameter: its shape}} without the body and the names in `heads`."""
    parts: dict[str, dict] = {}
    for name, value in state.items():
        if not name.startswith(BODY) and name not in heads:
            parts.setdefault(_part(name), {})[name] = value.shape
    return parts


def _part(name: str) -> str:
    """Return the first two components of a parameter's name, such as "roi_heads.box_head"."""
    return ".".join(name.split(".")[:2])
