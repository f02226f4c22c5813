"""Load weights into the body of a detector or segmentation model: a network without its head."""

from collections.abc import Mapping

from torch import Tensor, nn

from vil.layers.pos_embed import AbsoluteEmbedding
from vil.models.vision_longformer import MsViT
from vil.pretrained.convert_2021 import BACKBONE
from vil.pretrained.load_weights import BODIES, Report, load_weights
from vil.pretrained.student import extract_student
from vil.pretrained.timm_weights import fit_timm
from vil.utils.errors import CheckpointError

CLASSIFIER = ("norm.", "head.")  # parameters of a classifier that a body does not have


def load_body(body: nn.Module, state: Mapping[str, Tensor], rule: str) -> Report:
    """Load the weights of another model into a body, an MsViT or a model of timm without its head.

    state: state dict of a classifier, detector or segmentation model, or of a detector of the
    original Vision Longformer code. The weights of heads are ignored.
    rule: method for resizing position embeddings and bias tables, see `load_weights`.

    Absolute position embeddings of a classifier are always interpolated to the size of the body's,
    even if `AbsoluteEmbedding.resize` is another method.
    """
    state, projectors = extract_student(state)
    is_msvit = isinstance(body, MsViT)
    detector = any(name.startswith(BACKBONE) for name in state)
    prefixes = BODIES if is_msvit else ()
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in state)), "")
    kept = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
    if is_msvit:
        surplus = tuple((BACKBONE if detector else "") + name for name in CLASSIFIER)
        kept = {name: value for name, value in kept.items() if not name.startswith(surplus)}
    else:
        known, kept = body.state_dict(), fit_timm(body, kept)
        kept = {name: value for name, value in kept.items() if name in known}
    if not kept:
        raise CheckpointError("the file has no weights of this network: check MODEL.ARCH")
    modules = () if detector else body.modules()
    embeddings = {m: m.resize for m in modules if isinstance(m, AbsoluteEmbedding)}
    try:
        for embedding in embeddings:
            embedding.resize = "interpolate"  # they cover the classifier's full image
        report = load_weights(body, kept, rule=rule, convert=is_msvit)
    finally:
        for embedding, resize in embeddings.items():
            embedding.resize = resize
    report.ignored += [name for name in state if name.removeprefix(prefix) not in kept]
    report.ignored += projectors
    return report
