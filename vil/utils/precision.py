"""Switch autocast off for computations that need their tensors' own precision."""

from contextlib import AbstractContextManager, nullcontext

import torch


@torch.compiler.assume_constant_result
def has_autocast(device: str) -> bool:
    """Whether autocast knows a device type (not meta). torch.compile does not trace this."""
    return torch.amp.is_autocast_available(device)


def autocast_off(device: str) -> AbstractContextManager:
    """Disable autocast inside, on devices that have it."""
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
