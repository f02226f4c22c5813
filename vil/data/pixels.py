"""Images between augmentation and normalization.

Loader workers decode, crop and augment images, and send them as bytes. `Batch.to` copies the bytes
to the device and normalizes them there, which sends a quarter of the data and is fast on a GPU. The
random rectangles of random erasing are drawn in the workers and filled in on the device. So all
devices compute the same numbers.

Shapes: B images, c channels, S image size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from vil.utils.memory import copy_to_device

Rectangle = tuple[int, int, Tensor]  # top row, left column, values (c, height, width)


@dataclass(frozen=True)
class Normalization:
    """How images of bytes become float32: they are scaled to 0..1, then mean and std are applied.

    divide: divide by 255, as timm does, instead of multiplying by 1/255 as torchvision does. The
    results differ in the last bit.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    divide: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize images (.., c, S, S) uint8. The result is float32."""
        x = images.to(torch.float32)
        # by a tensor, because CUDA multiplies by the inverse of a number
        x = x.div_(torch.full((), 255.0, device=x.device)) if self.divide else x.mul_(1 / 255)
        mean, std = self.constants(x.device)
        return x.sub_(mean).div_(std)

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and std (c, 1, 1) on a device."""
        values = torch.tensor([self.mean, self.std])[..., None, None]
        mean, std = copy_to_device(values, device).unbind()
        return mean, std


class Pixels(NamedTuple):
    """An augmented image (c, S, S) uint8, which is not normalized yet. `erased`: rectangles to
    replace after normalization, in this order."""

    image: Tensor
    normalization: Normalization
    erased: tuple[Rectangle, ...] = ()

    def to_float(self) -> Tensor:
        """Return the normalized image (c, S, S) float32."""
        return PixelBatch.collate([self]).to_float()[0]


class PixelBatch(NamedTuple):
    """Augmented images (B, c, S, S) uint8, which are not normalized yet.

    places (n, 5) int64: index of the image, top row, left column, height and width of each
    rectangle to replace. values: their values, flattened and concatenated.
    """

    images: Tensor
    normalization: Normalization
    places: Tensor
    values: Tensor

    @classmethod
    def collate(cls, samples: Sequence[Pixels]) -> "PixelBatch":
        rectangles = [(i, *erased) for i, sample in enumerate(samples) for erased in sample.erased]
        places = [(i, top, left, *values.shape[1:]) for i, top, left, values in rectangles]
        values = [values.flatten() for *_, values in rectangles]
        return cls(
            torch.stack([sample.image for sample in samples]),
            samples[0].normalization,
            torch.tensor(places, dtype=torch.int64).reshape(-1, 5),
            torch.cat(values) if values else torch.empty(0),
        )

    def to_float(
        self,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Copy the images to a device, and return them normalized, (B, c, S, S) float32."""
        images = self.images.to(device, non_blocking=True, memory_format=memory_format)
        images = self.normalization(images)
        values, first = self.values.to(device, non_blocking=True), 0
        for i, top, left, height, width in self.places.tolist():
            patch = images[i, :, top : top + height, left : left + width]
            patch.copy_(values[first : first + patch.numel()].view(patch.shape))
            first += patch.numel()
        return images

    def pin_memory(self) -> "PixelBatch":
        return self._replace(images=self.images.pin_memory(), values=self.values.pin_memory())


class ImageTransform:
    """A transform of images to normalized tensors (c, S, S) float32.

    steps: transforms of a PIL image to a PIL image. erase: random erasing, or None.
    `to_pixels` stops before the normalization, for loader workers.
    """

    def __init__(
        self,
        steps: Sequence[Callable],
        normalization: Normalization,
        erase: RandomErasing | None = None,
    ) -> None:
        self.steps = v2.Compose([*steps, v2.PILToTensor()])
        self.normalization, self.erase = normalization, erase

    def __call__(self, image: Any) -> Tensor:
        return self.to_pixels(image).to_float()

    def to_pixels(self, image: Any) -> Pixels:
        """Augment an image, without the normalization."""
        pixels = self.steps(image)
        if self.erase is None:
            return Pixels(pixels, self.normalization)
        recorder = _Recorder(pixels.shape)
        self.erase(recorder)
        return Pixels(pixels, self.normalization, tuple(recorder.erased))

    def __repr__(self) -> str:
        return f"ImageTransform({self.steps}, {self.normalization}, {self.erase})"


class _Recorder:
    """Stands in for an image in timm's random erasing, and records what would be replaced."""

    dtype = torch.float32

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.erased = shape, []

    def size(self) -> torch.Size:
        return self.shape

    def __setitem__(self, place: tuple[slice, slice, slice], values: Tensor) -> None:
        _, rows, cols = place
        size = self.shape[0], rows.stop - rows.start, cols.stop - cols.start
        self.erased.append((rows.start, cols.start, values.expand(size)))


def loader_transform(transform: Callable) -> Callable:
    """Return what loader workers apply in place of a transform: without normalization if that can
    be left to `Batch.to`."""
    return transform.to_pixels if isinstance(transform, ImageTransform) else transform
