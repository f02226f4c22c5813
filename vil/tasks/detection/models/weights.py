"""Load a weight file into a detector, or into its body (the network before the feature pyramid)."""

from pathlib import Path

from torch import nn

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
        head: "keep" to load the layers that depend on the number of categories, "new" to leave them
            as initialized.
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
        return load_weights(model, state, head=head, rule=rule)
    if strict:
        raise CheckpointError(
            f"{path} has no weights for the heads of a detector, so the heads would be random: use "
            "the file only to start a training (vil train)"
        )
    return load_body(model.backbone.body, state, rule)
