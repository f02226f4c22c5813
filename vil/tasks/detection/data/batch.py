"""Batches of detection samples: images of any sizes, each with its target.

Shapes: B samples, n objects of an image, H W its size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vil.data.batch import BadSample, Batch

Target = dict[str, Any]


@dataclass(frozen=True, eq=False)
class DetectionBatch(Batch):
    """B samples of one step.

    A target has `boxes` (n, 4) float32, x1 y1 x2 y2 in pixels; `labels` (n,) int64 from 1;
    `masks` (n, H, W) uint8 if the dataset has them; `image_id`, an int.
    """

    images: list[Tensor]  # B of (3, H, W): uint8, on the device float32 in 0..1
    targets: list[Target]

    def pin_memory(self) -> "DetectionBatch":
        """Called by DataLoader's pin-memory thread."""
        return self.apply(Tensor.pin_memory)

    def to(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> "DetectionBatch":
        """Copy to the device without waiting, then scale images to float32 in 0..1.

        memory_format is ignored: images are padded into a batch later, by the model.
        """
        moved = self.apply(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, images=[to_unit_range(image) for image in moved.images])

    def apply(self, function: Callable[[Tensor], Tensor]) -> "DetectionBatch":
        """Apply a function to every tensor of images and targets."""
        images, targets = tree_map_only(Tensor, function, (self.images, self.targets))
        return replace(self, images=images, targets=targets)


def to_unit_range(image: Tensor) -> Tensor:
    """Convert uint8 to float32 in 0..1; return a float image unchanged."""
    return image if image.is_floating_point() else image.float() / 255


def collate(samples: list[tuple], bad_samples: tuple[BadSample, ...]) -> DetectionBatch:
    """Collate any number of samples (image, target, index)."""
    targets = [dict(target) for _, target, _ in samples]
    for key in {k for target in targets for k, v in target.items() if isinstance(v, Tensor)}:
        for target, value in zip(targets, share_buffer([target[key] for target in targets])):
            target[key] = value
    indices = torch.tensor([index for *_, index in samples], dtype=torch.int64)
    images = share_buffer([image for image, *_ in samples])
    return DetectionBatch(images, targets, indices, bad_samples=bad_samples)


def share_buffer(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to views of one buffer.

    Each buffer sent by a worker takes an open file on both sides. One per tensor, times the
    prefetched batches, would exceed the usual limit of 1024.
    """
    if not tensors:
        return []
    buffer = torch.cat([tensor.flatten() for tensor in tensors])
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
