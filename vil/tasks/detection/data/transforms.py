"""What a training picture goes through, with its boxes and masks. Evaluation has no transform: the
detector itself resizes.

Pictures are uint8 tensors (3, H, W); targets are those of `vil/tasks/detection/data/batch.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from vil.tasks.detection.data.batch import Target
from vil.tasks.detection.data.coco_json import MIN_SIDE

# Around pictures smaller than the crop of large-scale jitter: ImageNet's mean, which is 0 once it
# has been subtracted.
PADDING = [124, 116, 104]


class _NotTooSmall:
    """A very long picture may not shrink to a side of no pixels, nor any to a single pixel, which
    torch's antialiased resizing of uint8 cannot write."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """The size (height, width) to resize to."""
        return {"size": tuple(max(side, 2) for side in super().make_params(flat_inputs)["size"])}


class ShortestSize(_NotTooSmall, v2.RandomShortestSize):
    """The shorter side becomes one of `min_size`, the longer one `max_size` at most."""


class ScaleJitter(_NotTooSmall, v2.ScaleJitter):
    """A random factor of the size that fits `target_size`."""


def train_transform(
    *,
    sizes: Sequence[int],
    max_size: int,
    flip: float = 0.5,
    jitter: Sequence[float] = (),
) -> Callable[[Tensor, Target], tuple[Tensor, Target]]:
    """Resize so that the shorter side is one of `sizes`, drawn, and the longer one max_size at
    most; flip horizontally with probability `flip`.

    jitter (low, high) instead of `sizes`: large-scale jitter (Ghiasi et al., arXiv:2012.07177), a
    factor between them of the size that fits max_size x max_size, and a crop or padding to that.
    """
    if jitter:
        square, fill = (max_size, max_size), {tv_tensors.Image: PADDING, "others": 0}
        crop = v2.RandomCrop(square, pad_if_needed=True, fill=fill)
        resize = [ScaleJitter(square, tuple(jitter)), crop]
    else:
        resize = [ShortestSize(list(sizes), max_size)]
    chain = v2.Compose([*resize, v2.RandomHorizontalFlip(flip)])

    def transform(image: Tensor, target: Target) -> tuple[Tensor, Target]:
        image, target = chain(tv_tensors.Image(image), as_tv_tensors(image, target))
        plain = {
            key: value.as_subclass(Tensor) if isinstance(value, Tensor) else value
            for key, value in target.items()
        }
        return image.as_subclass(Tensor), clipped(plain, image.shape[-2:], cropped=bool(jitter))

    return transform


def as_tv_tensors(image: Tensor, target: Target) -> Target:
    """The target with types that torchvision's transforms know."""
    boxes = tv_tensors.BoundingBoxes(
        target["boxes"], format="XYXY", canvas_size=tuple(image.shape[-2:])
    )
    typed = {**target, "boxes": boxes}
    if "masks" in target:
        typed["masks"] = tv_tensors.Mask(target["masks"])
    return typed


def clipped(target: Target, size: Sequence[int], *, cropped: bool = False) -> Target:
    """The target with boxes cut at the border of a picture of size (H, W), without the objects of
    which less than MIN_SIDE is left; after a crop, also without those that have no pixel left of
    their mask: the box of an L can be there when the L is not.
    """
    height, width = size
    boxes = target["boxes"]
    limits = torch.tensor([width, height, width, height], dtype=boxes.dtype)
    boxes = boxes.clamp(min=0).minimum(limits)
    keep = (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE).all(dim=1)
    if cropped and "masks" in target:
        keep &= target["masks"].flatten(1).any(dim=1).bool()  # of uint8 it is uint8
    return {
        key: value[keep] if isinstance(value, Tensor) else value
        for key, value in {**target, "boxes": boxes}.items()
    }
