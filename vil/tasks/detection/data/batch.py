"""What a loader gives of a detection set: pictures of any sizes, each with its own target.

Letters: B samples, n objects of one of them, H W its size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vil.data.batch import BadSample

Target = dict[str, Any]


@dataclass(frozen=True, eq=False)
class DetectionBatch:
    """B samples of one step. `indices` stay on the host: they only lead back to the names.

    A target has `boxes` (n, 4) float32, x1 y1 x2 y2 in pixels of its picture; `labels` (n,) int64
    from 1; `masks` (n, H, W) uint8 where the set has them; `image_id`, an int.
    """

    images: list[Tensor]  # B of (3, H, W): uint8, or float32 in 0..1 once on the device
    targets: list[Target]
    indices: Tensor  # (B,) int64: the samples that are inside, substitutes included
    epoch: int = 0
    step: int = 0
    bad_samples: tuple[BadSample, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "DetectionBatch":
        """Called by DataLoader's pin-memory thread."""
        return self.each(Tensor.pin_memory)

    def to(
        self,
        device: torch.device | str,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> "DetectionBatch":
        """Everything on the device, without waiting for the copies; images become float32 in 0..1
        there, after a copy of a quarter of the bytes.

        memory_format is for batches of one tensor: a picture alone has no order of channels that
        survives the padding to a common size.
        """
        moved = self.each(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, images=[unit_range(image) for image in moved.images])

    def each(self, change: Callable[[Tensor], Tensor]) -> "DetectionBatch":
        """A batch whose images and targets have been changed tensor by tensor."""
        targets = [
            {key: change(value) if isinstance(value, Tensor) else value for key, value in t.items()}
            for t in self.targets
        ]
        return replace(self, images=[change(image) for image in self.images], targets=targets)


def unit_range(image: Tensor) -> Tensor:
    """uint8 -> float32 in 0..1; one that is float already stays as it is."""
    return image if image.is_floating_point() else image.float() / 255


def collate(rows: list[tuple[tuple | None, list[BadSample]]]) -> DetectionBatch:
    """Rows are (sample (image, target, index) or None, reports); the Nones are left out."""
    samples = [sample for sample, _ in rows if sample is not None]
    bad_samples = tuple(report for _, reports in rows for report in reports)
    targets = [dict(target) for _, target, _ in samples]
    for key in {key for target in targets for key, value in target.items() if is_tensor(value)}:
        for target, value in zip(targets, in_one_buffer([target[key] for target in targets])):
            target[key] = value
    indices = torch.tensor([index for *_, index in samples], dtype=torch.int64)
    images = in_one_buffer([image for image, *_ in samples])
    return DetectionBatch(images, targets, indices, bad_samples=bad_samples)


def in_one_buffer(tensors: list[Tensor]) -> list[Tensor]:
    """The same values as views of one tensor.

    Each buffer that a worker sends costs an open file on both sides: one for each tensor of a batch
    of 32 pictures, times the batches that wait, is more than the usual limit of 1024.
    """
    if not tensors:
        return []
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def is_tensor(value: object) -> bool:
    """Not the image's id, which is an int."""
    return isinstance(value, Tensor)
