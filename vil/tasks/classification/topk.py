"""How answers are judged, image by image: the loss, and whether the right class was found.

Letters: B images, K classes of the model, C classes of the test set.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scores(NamedTuple):
    losses: Tensor  # (B,), 0 where there is none
    first: Tensor  # (B,) bool: the best answer is right
    five: Tensor  # (B,) bool: one of the five best is; of all, where there are fewer
    judged: Tensor  # (B,) bool: there is a loss


def by_class(logits: Tensor, targets: Tensor) -> Scores:
    """Cross entropy and hits; logits (B, K), targets (B,)."""
    hits = best_five(logits) == targets[:, None]
    losses = F.cross_entropy(logits, targets, reduction="none")
    return Scores(losses, hits[:, 0], hits.any(dim=-1), torch.ones_like(targets, dtype=torch.bool))


def by_links(logits: Tensor, targets: Tensor, links: Tensor) -> Scores:
    """The test set has other classes than the model: `links` (K, C) says which mean the same.

    Model classes without a link are out of the running. An answer is right if it is linked with the
    image's class; the loss is minus the logarithm of the probability that these have among all that
    are linked. An image whose class has no link cannot be got right: it counts as wrong, and it has
    no loss (which would be infinite).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~links.any(dim=1), -torch.inf)
    right = links.T[targets]  # (B, K)
    judged = right.any(dim=-1)
    of_right = logits.masked_fill(~right, -torch.inf).logsumexp(dim=-1)
    losses = torch.where(judged, logits.logsumexp(dim=-1) - of_right, 0)
    hits = right.gather(1, best_five(logits))
    return Scores(losses, hits[:, 0], hits.any(dim=-1), judged)


def best_five(logits: Tensor) -> Tensor:
    """Classes (B, 5), best first; fewer if there are fewer."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices
