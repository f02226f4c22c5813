"""Training losses of segmentation: weighted sums of cross entropy, dice, focal and Lovász loss.

Shapes: B images, K classes, H, W height and width of the images. P: number of the labeled pixels of
an image, those whose class is not IGNORE.

Each term is a function of the logits (K, H, W) float32 and the classes (H, W) int64 of one image,
which returns a scalar. It depends on the labeled pixels only, and is 0 for an image without any.
The loss of a batch is the mean of the losses of its images. So it does not depend on how a batch is
divided into parts or among ranks. Only Lovász waits for the device (host-device synchronization).

dice, focal and lovasz are those of segmentation_models_pytorch, with its default parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.tasks.segmentation import IGNORE
from vil.utils.extras import SEGMENTATION, require_extra
from vil.utils.lookup import lookup

Term = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weights: Tensor | None = None,
    hard_pixels: float = 1.0,
) -> Tensor:
    """Compute the softmax cross entropy, averaged over the labeled pixels.

    class_weights (K,): weight of the pixels of each class in the mean, as in torch's
    `cross_entropy`; None: 1. hard_pixels: share of the labeled pixels that count, which are those
    with the largest cross entropy before weighting (online hard example mining, arXiv:1604.03540).
    Their number, P * hard_pixels, is rounded, and at least 1.
    """
    losses = F.cross_entropy(logits[None], target[None], ignore_index=IGNORE, reduction="none")
    losses, target = losses.flatten(), target.flatten()
    labeled = target != IGNORE
    weights = labeled.float()
    if class_weights is not None:
        weights = weights * class_weights[target.clamp(min=0)]
    if hard_pixels < 1:
        order = losses.detach().masked_fill(~labeled, -1).argsort(descending=True, stable=True)
        num_hard = (hard_pixels * labeled.sum()).round().clamp(min=1)
        is_hard = torch.empty_like(labeled)
        is_hard[order] = torch.arange(len(order), device=order.device) < num_hard
        weights = weights * is_hard
    total = weights.sum()
    return (losses * weights).sum() / torch.where(total > 0, total, 1)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the soft dice loss, averaged over all K classes. That of a class without labeled
    pixels is 0."""
    from segmentation_models_pytorch.losses import DiceLoss

    return DiceLoss("multiclass", ignore_index=IGNORE)(logits[None], target[None])


def focal(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the focal loss (arXiv:1708.02002) of each class against all others, with sigmoids and
    gamma 2, averaged over classes and labeled pixels.

    smp's multiclass mode has the same values, but loops over classes.
    """
    from segmentation_models_pytorch.losses import FocalLoss

    classes = torch.arange(len(logits), device=logits.device)[:, None, None]
    truth = (target == classes).to(logits.dtype)
    losses = FocalLoss("binary", reduction="none")(logits, truth).view_as(logits)
    labeled = target != IGNORE
    return (losses * labeled).sum() / (len(logits) * labeled.sum().clamp(min=1))


def lovasz(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the Lovász-softmax loss (arXiv:1705.08790), averaged over the classes of the labeled
    pixels."""
    from segmentation_models_pytorch.losses import LovaszLoss

    # For an image without labeled pixels, smp returns an empty tensor, whose sum is 0.
    return LovaszLoss("multiclass", ignore_index=IGNORE)(logits[None], target[None]).sum()


TERMS = {"ce": cross_entropy, "dice": dice, "focal": focal, "lovasz": lovasz}


@dataclass(frozen=True)
class SegmentationLoss:
    """Weighted sum of terms. terms, weights: {name: function}, {name: its weight in the sum}."""

    terms: Mapping[str, Term]
    weights: Mapping[str, float]

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and {name: value of the term without its weight, detached}.

        logits (B, K, H, W): of any floating-point dtype; the loss is computed in float32, also
        under autocast. targets (B, H, W): integers, class numbers or IGNORE.
        """
        with torch.autocast(logits.device.type, enabled=False):
            images = list(zip(logits.float(), targets.long()))
            values = {
                name: torch.stack([term(*image) for image in images]).mean()
                for name, term in self.terms.items()
            }
            total = torch.stack(
                [self.weights[name] * value for name, value in values.items()]
            ).sum()
        return total, {name: value.detach() for name, value in values.items()}


def parse_loss(
    text: str,
    *,
    num_classes: int,
    class_weights: Tensor | None = None,
    hard_pixels: float = 1.0,
) -> SegmentationLoss:
    """Convert the value of SEGMENTATION.LOSS, such as "ce + dice:0.5", to a loss.

    The terms are separated by "+". A number after a colon is the weight of a term, by default 1.
    num_classes: K, the number of class weights, if they are given.
    class_weights (K,), on the device of the logits, and hard_pixels: see `cross_entropy`. Raises
    ValueError for an unknown term, for an invalid weight, and for class weights or hard pixels
    without ce, and DataError if a term needs a package that is not installed.
    """
    weights: dict[str, float] = {}
    for part in text.split("+"):
        name, colon, number = (word.strip() for word in part.partition(":"))
        lookup(TERMS, name, "term of SEGMENTATION.LOSS")
        if name in weights:
            raise ValueError(f"SEGMENTATION.LOSS {text!r} has {name} twice: give it one weight")
        weights[name] = _parse_weight(number, name) if colon else 1.0
        if name != "ce":
            require_extra(SEGMENTATION, f"the loss {name}")
    if "ce" not in weights and (class_weights is not None or hard_pixels < 1):
        key = "SEGMENTATION.HARD_PIXELS" if class_weights is None else "LOSS.CLASS_WEIGHTS"
        raise ValueError(f"{key} needs the term ce, which SEGMENTATION.LOSS {text!r} does not have")
    if class_weights is not None and len(class_weights) != num_classes:
        raise ValueError(f"there are {len(class_weights)} class weights for {num_classes} classes")
    ce = partial(cross_entropy, class_weights=class_weights, hard_pixels=hard_pixels)
    return SegmentationLoss({name: {**TERMS, "ce": ce}[name] for name in weights}, weights)


def _parse_weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ValueError(
            f"the weight of {name} in SEGMENTATION.LOSS must be a number above 0, not {text!r}"
        )
    return weight
