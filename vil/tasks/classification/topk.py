"""Score predictions per image: the loss, and top-1 and top-5 hits.

Shapes: B images, K classes of the model, C classes of the test set.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scores(NamedTuple):
    """Scores of B images."""

    losses: Tensor  # (B,), 0 without a loss
    top1: Tensor  # (B,) bool
    top5: Tensor  # (B,) bool
    has_loss: Tensor  # (B,) bool


def score_by_class(logits: Tensor, targets: Tensor) -> Scores:
    """Compute cross entropy and hits; logits (B, K), targets (B,)."""
    hits = top_five(logits) == targets[:, None]
    losses = F.cross_entropy(logits, targets, reduction="none")
    return Scores(losses, hits[:, 0], hits.any(dim=-1), torch.ones_like(targets, dtype=torch.bool))


def score_by_mapping(logits: Tensor, targets: Tensor, class_mapping: Tensor) -> Scores:
    """Score a test set with other classes than the model's.

    class_mapping (K, C) bool: which classes of the model and the test set have the same meaning.
    Unmapped classes of the model are ignored. A prediction is correct if it maps to the image's
    class; the loss is -log of the probability of the classes mapped to it among all mapped ones. An
    image whose class has no mapped class counts as wrong and has no loss.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~class_mapping.any(dim=1), -torch.inf)
    correct = class_mapping.T[targets]  # (B, K)
    has_loss = correct.any(dim=-1)
    correct_logits = logits.masked_fill(~correct, -torch.inf).logsumexp(dim=-1)
    losses = torch.where(has_loss, logits.logsumexp(dim=-1) - correct_logits, 0)
    hits = correct.gather(1, top_five(logits))
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss)


def top_five(logits: Tensor) -> Tensor:
    """Return classes (B, min(5, K)), best first."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices
