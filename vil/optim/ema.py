"""An exponential moving average of a model's weights, which often evaluates better than they do.

After t steps with the weights w_1 .. w_t, starting from w_0:

    average = decay^t * w_0 + (1 - decay) * sum over i of decay^(t - i) * w_i
"""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """`model` is a copy, in eval mode and without gradients, that holds the average.

    Its names are those of `source`, the plain model (not in DDP or torch.compile). It costs the
    memory of the weights once more, and one pass over them per step.
    """

    def __init__(self, source: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of an average of weights lies in [0, 1), given {decay}")
        self.source, self.decay = source, decay
        self.model = copy.deepcopy(source).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, bad: Tensor | None = None) -> None:
        """Take in the weights of one more step, unless `bad` (no dimension) is 1: it stands still.
        Buffers (statistics, redraws) are copied."""
        ours, theirs = (parts_of(model) for model in (self.model, self.source))
        if bad is None:
            torch._foreach_lerp_(ours, theirs, 1 - self.decay)
        else:  # a share that the device knows and the host does not
            steps = torch._foreach_sub(theirs, ours)
            for step in steps:
                step.mul_((1 - bad) * (1 - self.decay))
            torch._foreach_add_(ours, steps)
        for ours, theirs in zip(self.model.buffers(), self.source.buffers()):
            ours.copy_(theirs)

    def restart(self) -> None:
        """Begin again at the weights of now."""
        self.model.load_state_dict(self.source.state_dict())


def parts_of(model: nn.Module) -> list[Tensor]:
    """The parameters, or this rank's slices of them."""
    return [p.to_local() if hasattr(p, "to_local") else p.data for p in model.parameters()]
