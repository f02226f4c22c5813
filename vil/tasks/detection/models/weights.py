"""Load a weight file into a detector, or into its body (the network before the feature pyramid)."""

from pathlib import Path

from torch import Tensor, nn

from vil.layers.pos_embed import AbsoluteEmbedding
from vil.pretrained.convert_2021 import BACKBONE
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.tasks.detection.models.detectors import BODY
from vil.utils.errors import CheckpointError

CLASSIFIER = ("norm.", "head.")  # parameters of a classifier that a body does not have


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


def load_body(body: nn.Module, state: dict[str, Tensor], rule: str) -> Report:
    """Load a classifier's weights into a detector's body, the network before the feature pyramid.

    state: state dict of a classifier, or of a detector of the original Vision Longformer code. The
    weights of heads are ignored.
    rule: method for resizing position embeddings and bias tables, see `load_weights`.

    Absolute position embeddings of a classifier are always interpolated to the size of the body's,
    even if `AbsoluteEmbedding.resize` is another method.
    """
    detector = any(name.startswith(BACKBONE) for name in state)
    surplus = tuple((BACKBONE if detector else "") + name for name in CLASSIFIER)
    unused = [name for name in state if name.startswith(surplus)]
    kept = {name: value for name, value in state.items() if name not in unused}
    modules = () if detector else body.modules()
    embeddings = {m: m.resize for m in modules if isinstance(m, AbsoluteEmbedding)}
    try:
        for embedding in embeddings:
            embedding.resize = "interpolate"  # they cover the classifier's full image
        report = load_weights(body, kept, rule=rule, convert=True)
    finally:
        for embedding, resize in embeddings.items():
            embedding.resize = resize
    report.ignored += unused
    return report
