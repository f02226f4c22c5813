"""A batch of classification samples, with reports of the images that could not be read."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate


class BadSample(NamedTuple):
    """Report of an image that cannot be read; workers send it with their batch."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples of one step. `indices` are never moved to the device: they only look up names."""

    images: Tensor  # (B, 3, H, W) float32
    targets: Tensor  # (B,) int64, or (B, K) float32 after mixing
    indices: Tensor  # (B,) int64: the samples in the batch, substitutes included
    epoch: int = 0
    step: int = 0
    bad_samples: tuple[BadSample, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "Batch":
        """Called by DataLoader's pin-memory thread."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())

    def to(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> "Batch":
        """Copy images and targets to the device without waiting for the copy."""
        images = self.images.to(device, non_blocking=True, memory_format=memory_format)
        return replace(self, images=images, targets=self.targets.to(device, non_blocking=True))


def collate(samples: list[tuple], bad_samples: tuple[BadSample, ...]) -> Batch:
    """Collate any number of samples (image, target, index)."""
    if not samples:
        empty = torch.empty(0, dtype=torch.int64)
        return Batch(torch.empty(0), empty, empty, bad_samples=bad_samples)
    return Batch(*default_collate(samples), bad_samples=bad_samples)
