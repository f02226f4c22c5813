"""Helpers for evaluation: eval mode, autocast, and synchronous iteration on all ranks."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vil.engine.distributed import all_reduce_max
from vil.engine.fsdp import unsharded


def iter_in_step(batches: Collection[Any], between: Callable[[], None]) -> Iterator[Any]:
    """Yield this rank's batches, and call `between` before each of them.

    `between` is called equally often on all ranks, so it may run collectives. A rank with fewer
    batches than another rank keeps calling `between` after its last batch.
    """
    iterator = iter(batches)
    for _ in range(all_reduce_max(len(batches))):
        between()
        if (batch := next(iterator, None)) is not None:
            yield batch


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context that runs operations in `dtype` (autocast). If `dtype` is None, autocast is
    disabled."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the context, set the model to eval mode, disable gradients and gather sharded weights.
    On exit, undo all of this.

    The weights must not change inside the context, because autocast converts each weight only once
    and not in each forward pass.
    """
    was_training = model.training
    model.eval()
    # autocast caches converted weights until its outermost context ends. This context keeps the
    # cache for the whole evaluation. It changes no setting.
    keep_converted = torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"))
    try:
        # not inference_mode: modules cache masks, and training could not use inference tensors
        with torch.no_grad(), unsharded(model), keep_converted:
            yield model
    finally:
        model.train(was_training)
