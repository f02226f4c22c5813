"""Computation in the tensors' own type, whatever autocast is asked for around it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_off(device: str) -> AbstractContextManager:
    """No autocast inside; devices that have none (meta) need nothing."""
    there = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if there else nullcontext()
