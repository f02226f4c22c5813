"""Training losses of multilabel classification.

Shapes: B images, K labels. Each loss takes logits (B, K) and targets (B, K) between 0 and 1, and
returns the losses (B, K) float32. positive_weights (K,): weight of positive images in the loss of
each label, like `pos_weight` of torch's BCEWithLogitsLoss; None: 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bce(logits: Tensor, targets: Tensor, positive_weights: Tensor | None = None) -> Tensor:
    """Compute the binary cross entropy of each image and label, (B, K).

    positive_weights (K,): weight of positive images in the loss of each label; None: 1.
    """
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

    positive_weights (K,): weight of positive images in the loss of each label; None: 1.
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


LOSSES = {"bce": bce, "asymmetric": asymmetric}
