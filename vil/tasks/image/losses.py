"""Training losses of classification and of multilabel classification.

Shapes: B images, K classes. Each loss of classification takes logits (B, K) and targets, which are
classes (B,) int64 or soft targets (B, K) float. It returns the mean over images or, if `per_image`
is set, the loss of each image (B,), in float32 or higher.
smoothing: label smoothing s. The target of the true class is 1 - s + s/K, and that of other classes
is s/K. Soft targets are not smoothed.

Each loss of multilabel classification, in LABEL_LOSSES, takes logits (B, K) and targets (B, K)
between 0 and 1, and returns the losses (B, K) float32. positive_weights (K,): weight of positive
images in the loss of each label, like `pos_weight` of torch's BCEWithLogitsLoss; None: 1.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.tasks.image import LOSSES
from vil.utils.registry import Entry, Key

LossFunction = Callable[..., Tensor]  # (logits, targets, smoothing=0.0) -> scalar
NOT_SINGLE_LABEL = ("multisoftmax", "mse")


def xentropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, *, per_image: bool = False
) -> Tensor:
    """Compute the softmax cross entropy, averaged over images."""
    logits = widen(logits)
    if targets.is_floating_point():
        losses = -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1)
        return losses if per_image else losses.mean()
    reduction = "none" if per_image else "mean"
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction=reduction)


def bce(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, *, per_image: bool = False
) -> Tensor:
    """Compute the binary cross entropy, averaged over classes and images (arXiv:2204.07118)."""
    losses = elementwise_bce(logits, soften(targets, logits, smoothing))
    return losses.mean(dim=-1) if per_image else losses.mean()


def sigmoid(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, *, per_image: bool = False
) -> Tensor:
    """Compute the binary cross entropy, summed over classes and averaged over images."""
    losses = elementwise_bce(logits, soften(targets, logits, smoothing)).sum(dim=-1)
    return losses if per_image else losses.mean()


def focal(
    logits: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    *,
    alpha: float = 1.0,
    gamma: float = 0.5,
    normalize: bool = True,
    per_image: bool = False,
) -> Tensor:
    """Compute the focal loss (arXiv:1708.02002, section 3).

    The binary cross entropy of each image and class is multiplied by (1 - p_t)^gamma. For
    probability p and target t, p_t is t * p + (1 - t) * (1 - p).

    alpha: weight of the positive term t * log(p) relative to the negative term. For the weight a of
    the paper, this is a / (1 - a). normalize: sum the loss over classes instead of averaging it.
    """
    targets = soften(targets, logits, smoothing).clamp(0, 1)  # mixup may round to above 1
    logits = widen(logits)
    # Compute log(1 - p_t). For confident predictions, 1 - p_t would round to 0, where a power with
    # an exponent below 1 has an infinite gradient.
    log_miss = torch.logaddexp(
        targets.log() + F.logsigmoid(-logits), (1 - targets).log() + F.logsigmoid(logits)
    )
    entropy = F.binary_cross_entropy_with_logits(
        logits, targets, reduction="none", pos_weight=logits.new_tensor(alpha)
    )
    losses = torch.exp(gamma * log_miss) * entropy
    if per_image:
        return losses.sum(dim=-1) if normalize else losses.mean(dim=-1)
    return losses.sum(dim=-1).mean() if normalize else losses.mean()


def label_bce(logits: Tensor, targets: Tensor, positive_weights: Tensor | None = None) -> Tensor:
    """Compute the binary cross entropy of each image and label, (B, K)."""
    return F.binary_cross_entropy_with_logits(
        logits.float(), targets, reduction="none", pos_weight=positive_weights
    )


def asymmetric(
    logits: Tensor,
    targets: Tensor,
    positive_weights: Tensor | None = None,
    *,
    gamma_pos: float = 0.0,
    gamma_neg: float = 4.0,
    clip: float = 0.05,
) -> Tensor:
    """Compute the asymmetric loss of each image and label, (B, K).

    For the probability p of a label and p_m = max(p - clip, 0), the loss is

        -(1 - p)^gamma_pos * log(p)          for images with the label,
        -p_m^gamma_neg * log(1 - p_m)        for other images.

    Source: Ridnik et al., arXiv:2009.14119, equations 4 to 7.
    """
    logits = logits.float()
    probability = logits.sigmoid()
    positive = -((1 - probability) ** gamma_pos) * F.logsigmoid(logits)
    if positive_weights is not None:
        positive = positive * positive_weights
    # at least 1e-8, because a power with an exponent below 1 has an infinite gradient at 0
    shifted = (probability - clip).clamp(min=1e-8)
    log_miss = torch.log1p(-shifted) if clip > 0 else F.logsigmoid(-logits)
    negative = -(shifted**gamma_neg) * log_miss
    return targets * positive + (1 - targets) * negative


LABEL_LOSSES = {"bce": label_bce, "asymmetric": asymmetric}


def build_loss(name: str, **own: Any) -> LossFunction:
    """Return the loss function that is registered under `name`.

    own: values that are bound to additional keyword arguments of the function, such as gamma of the
    focal loss. Raises ValueError for an unknown name.
    """
    if name in NOT_SINGLE_LABEL:
        names = ", ".join(LOSSES)
        raise ValueError(f"{name} is not a loss of single-label classification (choices: {names})")
    loss = LOSSES.load(name)
    return partial(loss, **own) if own else loss


def takes_weights(loss: LossFunction) -> bool:
    """Return whether a loss supports class weights and sample weights.

    A loss that supports them has the argument `per_image`, to return the loss of each image.
    """
    return "per_image" in inspect.signature(loss).parameters


def check_loss(loss: Any, entry: Entry) -> None:
    """Raise ValueError unless the loss returns a differentiable scalar in two test calls.

    Both calls have two images and three classes. One has class targets, and the other has soft
    targets. entry: registry entry of the loss.
    """
    own = {a: key.default for a, key in entry.keys.items() if isinstance(key, Key)}
    logits = torch.zeros(2, 3, requires_grad=True)
    for targets in (torch.tensor([0, 2]), torch.full((2, 3), 1 / 3)):
        try:
            value = loss(logits, targets, 0.1, **own)
            shape = tuple(value.shape)
            torch.autograd.grad(value.sum(), logits)
        except Exception as error:
            raise ValueError(
                f"loss {entry.name!r} fails in a test call with two images and targets of shape "
                f"{tuple(targets.shape)}: {error}"
            ) from error
        if shape:
            raise ValueError(
                f"loss {entry.name!r} must return a scalar, not a tensor of shape {shape}"
            )


def widen(logits: Tensor) -> Tensor:
    """Convert logits to float32, unless they are float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def soften(targets: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """Convert targets to soft targets (B, K) of float32, or of float64 if the logits are float64.

    targets: classes (B,), which are converted and smoothed, or soft targets (B, K), which are only
    cast. logits (B, K): determine K. smoothing: amount of label smoothing.
    """
    dtype, classes = widen(logits).dtype, logits.shape[-1]
    if targets.is_floating_point():
        return targets.to(dtype)
    return F.one_hot(targets, classes).to(dtype) * (1 - smoothing) + smoothing / classes


def elementwise_bce(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the binary cross entropy of each image and class, (B, K), in float32 or higher."""
    return F.binary_cross_entropy_with_logits(widen(logits), targets, reduction="none")
