"""Versions and devices."""

import platform

import torch

from vil.engine.run_dir import PACKAGES, version
from vil.ops import BACKENDS


def describe_environment(device: torch.device) -> list[str]:
    """Lines with Python, package versions, the device and its threads."""
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [
        f"python {platform.python_version()} on {platform.platform()}",
        "  ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"device {device}, {torch.get_num_threads()} threads, CUDA: {', '.join(cards) or 'none'}",
    ]


def describe_backend(name: str) -> str:
    """What a backend of local attention is."""
    return BACKENDS[name].about
