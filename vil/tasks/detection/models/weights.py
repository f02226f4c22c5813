"""Weights for a detector: all of a detector of ours, or a classifier's for its body alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import Tensor, nn

from vil.layers.pos_embed import AbsoluteEmbedding
from vil.pretrained.convert_2021 import BACKBONE
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.tasks.detection.models.detectors import BODY
from vil.utils.errors import CheckpointError

CLASSIFIER = ("norm.", "head.")  # what a classifier has and a body has not


def load_detector(
    model: nn.Module, path: Path, *, head: str = "keep", rule: str = "linear", whole: bool = False
) -> Report:
    """Load a file of weights and report every key.

    A detector of ours is loaded strictly; head "new" leaves what has a row per category as it was
    initialised. Any other file is for the body: a classifier, ours or the 2021 reference's, or one
    of its detectors, of which the rest is not used. The reference's rules of conversion hold:
    positions are resized, full attention goes into longformer's, a single global token is repeated.
    whole: refuse such a file, with which the heads would stay random.
    Raises CheckpointError for weights that do not fit, and ValueError for rows of a head: of
    several, whose rows are anchors and sides of boxes too.
    """
    if head not in ("keep", "new"):
        raise ValueError(f"the heads of a detector are kept or new, they have no {head}")
    state = read_weights(path)
    if any(name.startswith(BODY) for name in state):
        return load_weights(model, state, head=head, rule=rule)
    if whole:
        raise CheckpointError(
            f"{path} is not a detector of ours, so its heads would be random: vil detect train "
            "makes one of it"
        )
    return load_body(model.backbone.body, state, rule)


def load_body(body: nn.Module, state: dict[str, Tensor], rule: str) -> Report:
    """The weights of a classifier or of the reference's detector, without what a body has not.

    A classifier's positions are those of its whole picture: they are stretched over the largest
    one, also where the body crops them for smaller ones.
    """
    detector = any(name.startswith(BACKBONE) for name in state)
    surplus = tuple((BACKBONE if detector else "") + part for part in CLASSIFIER)
    unused = [name for name in state if name.startswith(surplus)]
    kept = {name: value for name, value in state.items() if name not in unused}
    with nullcontext() if detector else stretching(body):
        report = load_weights(body, kept, rule=rule, convert=True)
    report.ignored += unused
    return report


@contextmanager
def stretching(body: nn.Module) -> Iterator[None]:
    """Inside, absolute positions of another size are interpolated."""
    rules = {m: m.resize for m in body.modules() if isinstance(m, AbsoluteEmbedding)}
    for position in rules:
        position.resize = "interpolate"
    try:
        yield
    finally:
        for position, rule in rules.items():
            position.resize = rule
