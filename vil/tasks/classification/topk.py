"""Score predictions image by image: the loss, and whether the correct class was found.

Shapes: B images, K classes of the model, C classes of the test set.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scores(NamedTuple):
    """Scores of B images."""

    losses: Tensor  # (B,), 0 where there is none
    top1: Tensor  # (B,) bool: the best prediction is correct
    top5: Tensor  # (B,) bool: one of the five best is; of all, where there are fewer
    has_loss: Tensor  # (B,) bool


def score_by_class(logits: Tensor, targets: Tensor) -> Scores:
    """Compute cross entropy and hits; logits (B, K), targets (B,)."""
    hits = best_five(logits) == targets[:, None]
    losses = F.cross_entropy(logits, targets, reduction="none")
    return Scores(losses, hits[:, 0], hits.any(dim=-1), torch.ones_like(targets, dtype=torch.bool))


def score_by_mapping(logits: Tensor, targets: Tensor, class_mapping: Tensor) -> Scores:
    """Score a test set with other classes than the model's: `class_mapping` (K, C) bool maps the
    model's classes to those of the test set with the same meaning.

    Unmapped classes of the model are ignored. A prediction is correct if it maps to the image's
    class; the loss is minus the logarithm of the probability that the classes mapped to it have
    among all that are mapped. An image whose class nothing maps to counts as wrong and has no loss
    (which would be infinite).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~class_mapping.any(dim=1), -torch.inf)
    correct = class_mapping.T[targets]  # (B, K)
    has_loss = correct.any(dim=-1)
    of_correct = logits.masked_fill(~correct, -torch.inf).logsumexp(dim=-1)
    losses = torch.where(has_loss, logits.logsumexp(dim=-1) - of_correct, 0)
    hits = correct.gather(1, best_five(logits))
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss)


def best_five(logits: Tensor) -> Tensor:
    """Classes (B, 5), best first; fewer if there are fewer."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices
