"""Transforms of an image and its mask together: (PIL image, mask) -> (Pixels, mask tensor).

A mask is an array or tensor (H, W) int16 of class numbers, with IGNORE for pixels without a label.
All random numbers come from the global generators of torch, Python and numpy, which the loader
seeds for each sample, so that a run resumes exactly.

Shapes: H, W size of an image; P side of a training crop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vil.data.pixels import ImageTransform, Normalization, Pixels
from vil.data.transforms import BLUR_KERNEL, BLUR_SIGMA, Resize, split_jitter, timm_transform

MaskTransform = Callable[[Image.Image, np.ndarray], tuple[Pixels, Tensor]]
TRIES = 10  # crops that are tried until no class has too large a share
BILINEAR = v2.InterpolationMode.BILINEAR
MOVING = ("Shear", "Translate", "Rotate")  # beginnings of the names of timm's geometric operations


def train_transform(
    size: int,
    *,
    scale: Sequence[float] = (0.5, 2.0),
    max_share: float = 0.75,
    hflip: float = 0.5,
    vflip: float = 0.0,
    quarters: bool = False,
    color_jitter: float | Sequence[float] = (0.4, 0.4, 0.4, 0.1, 0.0),
    gray_scale: float = 0.0,
    gaussian_blur: float = 0.0,
    auto_augment: str | None = None,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
) -> MaskTransform:
    """Build the training transform: a random crop of a scaled image, flips, rotations and colors.

    Args:
        size: side P of the crop in pixels.
        scale, max_share: see `RandomScaledCrop`.
        hflip, vflip, gray_scale, gaussian_blur: probabilities.
        quarters: rotate by a random multiple of 90 degrees.
        color_jitter: see `vil.data.transforms.train_transform`.
        auto_augment: name of a timm policy. timm then applies the color augmentations too, except
            for the color jitter, which only the policies with "3a" keep.

    Raises ValueError if `auto_augment` is not a policy, or moves pixels.
    """
    strengths, jitter_prob = split_jitter(color_jitter)
    colors = [
        v2.RandomApply([v2.ColorJitter(*strengths)], jitter_prob),
        v2.RandomGrayscale(gray_scale),
        v2.RandomApply([v2.GaussianBlur(BLUR_KERNEL, BLUR_SIGMA)], gaussian_blur),
    ]
    if auto_augment:
        settings = dict(color_jitter=strengths, color_jitter_prob=jitter_prob)
        settings |= dict(grayscale_prob=gray_scale, gaussian_blur_prob=gaussian_blur)
        colors = [timm_colors(auto_augment, size, mean=tuple(mean), **settings)]
    pixels = ImageTransform(colors, Normalization(tuple(mean), tuple(std)))
    crop, move = RandomScaledCrop(size, scale, max_share), [v2.RandomHorizontalFlip(hflip)]
    move.append(v2.RandomVerticalFlip(vflip))
    if quarters:
        move.append(v2.RandomChoice([v2.RandomRotation((a, a)) for a in (0, 90, 180, 270)]))
    move = v2.Compose(move)

    def transform(image: Image.Image, mask: np.ndarray) -> tuple[Pixels, Tensor]:
        image, cropped = crop(image, mask)
        image, cropped = move(image, tv_tensors.Mask(cropped))
        return pixels.to_pixels(image), cropped.as_subclass(Tensor).contiguous()

    return transform


class RandomScaledCrop:
    """Crop a random square of an image that is scaled by a random factor, with its mask.

    size: side P of the crop. scale: (low, high), the range of the factor. The factor is increased
    where the scaled image would be smaller than the crop, so a crop is never padded. Only the crop
    is resized: a square of P / factor pixels of the image, rounded.
    max_share: the largest share of one class among the labeled pixels of a crop. Up to TRIES
    positions are tried with the same factor, and the last one is kept. 1 accepts any crop.
    """

    def __init__(self, size: int, scale: Sequence[float], max_share: float):
        self.size, (self.low, self.high), self.max_share = size, scale, max_share

    def __call__(self, image: Image.Image, mask: np.ndarray) -> tuple[Image.Image, Tensor]:
        """Crop an image and its mask (H, W). Returns the image and the mask (P, P)."""
        height, width = mask.shape
        factor = torch.empty(1).uniform_(self.low, self.high).item()
        side = max(1, min(round(self.size / factor), height, width))
        # at the centers of the pixels, like the bilinear interpolation of the image
        nearest = ((np.arange(self.size) + 0.5) * (side / self.size)).astype(np.int64)
        for _ in range(TRIES):
            top = int(torch.randint(height - side + 1, ()))
            left = int(torch.randint(width - side + 1, ()))
            cropped = mask[(top + nearest)[:, None], left + nearest]
            if self.max_share >= 1 or largest_share(cropped) <= self.max_share:
                break
        size = [self.size, self.size]
        image = F.resized_crop(image, top, left, side, side, size, BILINEAR)
        return image, torch.from_numpy(cropped)


def largest_share(mask: np.ndarray) -> float:
    """Return the share of the largest class among the labeled pixels of a mask; 1 without any."""
    counts = np.bincount(mask.ravel() + 1)[1:]  # IGNORE is -1
    return float(counts.max() / counts.sum()) if counts.sum() else 1.0


def timm_colors(name: str, size: int, **settings: Any) -> Callable[[Image.Image], Image.Image]:
    """Return timm's policy `name` with its color augmentations. size: side of the images. settings:
    see `timm_transform`.

    Raises ValueError for an unknown policy, and for one that moves pixels, because the mask would
    stay as it is.
    """
    _, colors, _ = timm_transform(size, auto_augment=name, separate=True, **settings)
    policy = colors.transforms[0]
    ops = getattr(policy, "ops", None) or [op for group in policy.policy for op in group]
    if moving := sorted({op.name for op in ops if op.name.startswith(MOVING)}):
        raise ValueError(
            f"the policy {name!r} (AUG.TIMM_AUG.AUTO_AUGMENT) moves pixels ({', '.join(moving)}), "
            "but masks need policies of colors only: use '3a' or 'rand-m9-n2-t3a'"
        )
    return colors


def image_transform(
    test_size: int = 0,
    *,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
) -> ImageTransform:
    """Build the transform of images without a mask, in evaluation and prediction.

    test_size: length in pixels to which the shorter side is resized; 0 for no resizing.
    """
    steps = [Resize(test_size, BILINEAR)] if test_size else []
    return ImageTransform(steps, Normalization(tuple(mean), tuple(std)))


def eval_transform(
    test_size: int = 0,
    *,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
) -> MaskTransform:
    """Build the evaluation transform, see `image_transform`. Masks keep their size, because metrics
    are computed at the resolution of the labels."""
    pixels = image_transform(test_size, mean=mean, std=std)

    def transform(image: Image.Image, mask: np.ndarray) -> tuple[Pixels, Tensor]:
        return pixels.to_pixels(image), torch.from_numpy(mask)

    return transform
