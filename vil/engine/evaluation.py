"""What every evaluation needs: eval mode, autocast, and as many batches on every rank."""

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vil.engine.distributed import all_reduce_max
from vil.engine.fsdp import unsharded


def iter_in_step(batches: Sized, between: Callable[[], None]) -> Iterator[Any]:
    """Yield this rank's batches, calling `between` as often on every rank as the one with the most
    batches does."""
    iterator = iter(batches)
    for _ in range(all_reduce_max(len(batches))):
        between()
        if (batch := next(iterator, None)) is not None:
            yield batch


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision in `dtype`; None changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Set the model to eval mode without gradients, and restore its mode at the end.

    Uses no_grad, not inference_mode: a tensor that a module caches under the latter (a mask, a
    position table) could not be used in training afterwards.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), unsharded(model):
            yield model
    finally:
        model.train(was_training)
