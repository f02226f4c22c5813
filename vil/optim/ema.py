"""Exponential moving average (EMA) of a model's weights.

After t steps with weights w_1 .. w_t, starting from w_0:

    average = decay^t * w_0 + (1 - decay) * sum over i of decay^(t - i) * w_i

Unlike in torch and timm, an update can be skipped by a flag on the device, without a copy to the
host.
"""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Exponential moving average of a model's weights.

    source: the model in training, without wrappers such as DDP. decay: factor of the previous
    average in an update, from 0 to below 1. The attribute `model` is a copy of `source` with the
    averaged weights, in eval mode.
    """

    def __init__(self, source: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(
                f"the decay of the EMA weights must be at least 0 and less than 1, got {decay}"
            )
        self.source, self.decay = source, decay
        self.model = copy.deepcopy(source).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        """Update the average with the current weights, and copy the buffers.

        bad: scalar tensor on the device, 1 if the training step was skipped because of a non-finite
        loss or gradient, else 0. If it is 1, only the buffers are copied.
        """
        averages, weights = local_parameters(self.model), local_parameters(self.source)
        steps = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(steps, (1 - bad) * (1 - self.decay))
        torch._foreach_add_(averages, steps)
        if buffers := list(self.model.buffers()):
            torch._foreach_copy_(buffers, list(self.source.buffers()))

    def restart(self) -> None:
        """Discard the average and start a new one from the current weights."""
        self.model.load_state_dict(self.source.state_dict())


def local_parameters(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters as plain tensors. For FSDP, these are this rank's shards."""
    return [p.to_local() if hasattr(p, "to_local") else p.data for p in model.parameters()]
