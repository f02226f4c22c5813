"""A batch of images and targets, with reports of the images that could not be read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from vil.data.pixels import PixelBatch, Pixels


class BadSample(NamedTuple):
    """An image that cannot be read: its index and name in the dataset, and the reason."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of B samples. `indices` are the dataset indices of the samples, for looking up their
    names. The indices stay on the CPU when the batch is moved to a device."""

    images: Tensor | PixelBatch  # (B, c, H, W) float32, c channels; a PixelBatch before `to`
    targets: Tensor  # (B,) int64; (B, K) float32 for labels and mixed classes, float64 for numbers
    indices: Tensor  # (B,) int64: dataset indices, also of substitutes for bad samples
    epoch: int = 0
    step: int = 0
    bad_samples: tuple[BadSample, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "Batch":
        """Return a copy with images and targets in pinned memory. DataLoader calls this method."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())

    def to(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> "Batch":
        """Return a copy with images and targets copied to the device asynchronously. Images that
        are not normalized yet are normalized there. memory_format applies to the images only."""
        if isinstance(self.images, PixelBatch):
            images = self.images.to_float(device, memory_format)
        else:
            images = self.images.to(device, non_blocking=True, memory_format=memory_format)
        targets = self.targets
        if torch.device(device).type == "mps" and targets.dtype == torch.float64:
            targets = targets.float()  # MPS has no float64
        return replace(self, images=images, targets=targets.to(device, non_blocking=True))


def collate(samples: list[tuple], bad_samples: tuple[BadSample, ...]) -> Batch:
    """Collate samples (image, target, index) into a Batch. An empty list gives an empty Batch.

    bad_samples: the images that could not be read. They are stored in the Batch.
    """
    if not samples:
        empty = torch.empty(0, dtype=torch.int64)
        return Batch(torch.empty(0), empty, empty, bad_samples=bad_samples)
    images, targets, indices = zip(*samples)
    is_normalized = not isinstance(images[0], Pixels)
    return Batch(
        stack(images) if is_normalized else PixelBatch.collate(images),
        stack(targets),
        stack(indices),
        bad_samples=bad_samples,
    )


def stack(values: Sequence) -> Tensor:
    """Stack tensors, arrays or numbers along a new axis. In a loader worker, the result is in
    shared memory, unless that is full."""
    try:
        return default_collate(list(values))
    except RuntimeError:  # of the shared memory, or of unequal sizes, which raises it again
        return torch.stack([torch.as_tensor(value) for value in values])
