"""Load weights into a detector: of a detector, or of a classifier for its body."""

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
    """Load a weight file and report every key.

    The file of a detector is loaded strictly; head "new" skips parameters with a row per category.
    Any other file is loaded into the body: a classifier, ours or the 2021 reference's, or the
    reference's detector, whose other parameters are ignored. It is converted by the reference's
    rules (`load_weights`).

    strict: reject a file for the body only, which leaves the heads random. Raises CheckpointError
    for weights that do not fit, and ValueError for head "rows": several heads have rows that are
    anchors and sides of boxes too.
    """
    if head not in ("keep", "new"):
        raise ValueError(f"the heads of a detector can be kept or new, not {head}")
    state = read_weights(path)
    if any(name.startswith(BODY) for name in state):
        return load_weights(model, state, head=head, rule=rule)
    if strict:
        raise CheckpointError(
            f"{path} is not a detector of vil, so its heads would be random: use it for training, "
            "vil detect train"
        )
    return load_body(model.backbone.body, state, rule)


def load_body(body: nn.Module, state: dict[str, Tensor], rule: str) -> Report:
    """Load a classifier or the reference's detector without its head.

    A classifier's position embeddings cover its full image, so they are interpolated to the largest
    image even if the body crops them for smaller ones.
    """
    detector = any(name.startswith(BACKBONE) for name in state)
    surplus = tuple((BACKBONE if detector else "") + name for name in CLASSIFIER)
    unused = [name for name in state if name.startswith(surplus)]
    kept = {name: value for name, value in state.items() if name not in unused}
    modules = () if detector else body.modules()
    embeddings = {m: m.resize for m in modules if isinstance(m, AbsoluteEmbedding)}
    try:
        for embedding in embeddings:
            embedding.resize = "interpolate"
        report = load_weights(body, kept, rule=rule, convert=True)
    finally:
        for embedding, resize in embeddings.items():
            embedding.resize = resize
    report.ignored += unused
    return report
