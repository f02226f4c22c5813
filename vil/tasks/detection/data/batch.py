"""Batches of detection samples, which are images of any sizes with targets.

Shapes: B samples, n objects of an image, H W size of an image.
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
    """A batch of B images of any sizes and their targets.

    A target is a dict with these keys, for n objects:
    boxes (n, 4) float32: x1 y1 x2 y2 in pixels.
    labels (n,) int64: counted from 1.
    image_id: an int.
    masks (n, H, W) uint8: only if masks are read.
    """

    images: list[Tensor]  # B of (3, H, W): uint8, or float32 in 0..1 after `to`
    targets: list[Target]

    def pin_memory(self) -> "DetectionBatch":
        """Pin the memory of all tensors. DataLoader's pin-memory thread calls this method."""
        return self.apply(Tensor.pin_memory)

    def to(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> "DetectionBatch":
        """Copy the batch to the device asynchronously, and convert images to float32 in 0..1.

        memory_format is ignored, because the model creates the padded batch of images.
        """
        moved = self.apply(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, images=[to_unit_range(image) for image in moved.images])

    def apply(self, function: Callable[[Tensor], Tensor]) -> "DetectionBatch":
        """Return a copy with `function` applied to every tensor of images and targets."""
        images, targets = tree_map_only(Tensor, function, (self.images, self.targets))
        return replace(self, images=images, targets=targets)


def to_unit_range(image: Tensor) -> Tensor:
    """Convert a uint8 image to float32 in 0..1. A float image is returned unchanged."""
    return image if image.is_floating_point() else image.float() / 255


def collate(samples: list[tuple], bad_samples: tuple[BadSample, ...]) -> DetectionBatch:
    """Collate samples (image, target, index in the dataset) into a batch.

    bad_samples: images that were sampled for the batch, but could not be read.
    """
    targets = [dict(target) for _, target, _ in samples]
    for key in {k for target in targets for k, v in target.items() if isinstance(v, Tensor)}:
        for target, value in zip(targets, share_buffer([target[key] for target in targets])):
            target[key] = value
    indices = torch.tensor([index for *_, index in samples], dtype=torch.int64)
    images = share_buffer([image for image, *_ in samples])
    return DetectionBatch(images, targets, indices, bad_samples=bad_samples)


def share_buffer(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors into one buffer, and return them as views of the buffer.

    Each buffer that a loader worker sends keeps a file open. With one buffer per tensor, prefetched
    batches would exceed the usual limit of 1024 open files.
    """
    if not tensors:
        return []
    buffer = torch.cat([tensor.flatten() for tensor in tensors])
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
