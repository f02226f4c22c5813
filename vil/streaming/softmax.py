"""Compute softmax attention over keys that are added K at a time (online softmax).

Source: arXiv:1805.02867. The running sums are float64, so that no precision is lost if keys are
added in many small parts.

Shapes: N heads, Q queries, D head dim, K keys that are added at once.
"""

import torch
from torch import Tensor

from vil.utils.precision import autocast_off


class OnlineSoftmax:
    """The attention of queries to keys and values that are added a few at a time (`add`).

    q (N, Q, D): queries. scale: factor by which q @ k^T is multiplied.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self.dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        self.q = q.to(wide) * scale
        state = dict(dtype=torch.float64, device=q.device)
        self.top = torch.full((*q.shape[:2], 1), -torch.inf, **state)
        self.total = torch.zeros_like(self.top)
        self.sums = torch.zeros(q.shape, **state)

    def add(self, k: Tensor, v: Tensor, bias: Tensor | None = None) -> None:
        """Let the queries attend to more keys. k, v: keys and values (heads, keys, channels). bias:
        added to the scores, broadcastable to (heads, queries, keys)."""
        with autocast_off(k.device.type):  # it would round the scores and the weights to 16 bits
            scores = self.q @ k.to(self.q.dtype).mT
            if bias is not None:
                scores += bias
            top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
            weights = scores.sub_(top.to(scores.dtype)).exp_()
            keep = torch.exp(self.top - top)
            self.total = self.total * keep + weights.sum(-1, keepdim=True)
            self.sums = self.sums * keep + weights @ v.to(weights.dtype)
            self.top = top

    def result(self) -> Tensor:
        """Return the attention output (N, Q, D) in the dtype of the queries."""
        return (self.sums / self.total).to(self.dtype)

    def state(self) -> dict[str, Tensor]:
        """Return the running maximum and sums, from which `restore` can resume."""
        return {"top": self.top, "total": self.total, "sums": self.sums}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Resume from the running maximum and sums that `state` returned."""
        self.top, self.total, self.sums = (
            state[name].to(self.q.device) for name in ("top", "total", "sums")
        )
