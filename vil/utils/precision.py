"""Disable autocast for computations that must keep the dtype of their tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


@torch.compiler.assume_constant_result
def has_autocast(device: str) -> bool:
    """Return whether autocast supports a device type. It supports "cuda" and "cpu", but not "meta".
    torch.compile treats the result as a constant and does not trace this function."""
    return torch.amp.is_autocast_available(device)


def autocast_off(device: str) -> AbstractContextManager:
    """Return a context manager that disables autocast, if the device type supports autocast."""
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
