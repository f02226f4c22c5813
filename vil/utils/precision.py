"""Computation in the tensors' own type, whatever autocast is asked for around it."""

from contextlib import AbstractContextManager, nullcontext

import torch


@torch.compiler.assume_constant_result
def has_autocast(device: str) -> bool:
    """Whether a kind of device has it (meta has not); torch.compile need not look inside."""
    return torch.amp.is_autocast_available(device)


def autocast_off(device: str) -> AbstractContextManager:
    """No autocast inside."""
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
