"""Views of an image for test-time augmentation: mirror images and crops, without randomness."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vil.utils.lookup import lookup

CROP = 7 / 8  # side of a corner crop, as a fraction of the image's shorter side


class View(NamedTuple):
    """One view of an image.

    corner: the corner (x, y) at which a square is cropped, from (0, 0) at the top left to (1, 1) at
    the bottom right; None for the full image. mirror: whether to flip the view horizontally.
    """

    corner: tuple[int, int] | None = None
    mirror: bool = False


CORNERS = ((0, 0), (1, 0), (0, 1), (1, 1))
WHOLE = (View(), View(mirror=True))
CROPS = tuple(View(corner) for corner in CORNERS)
ALL = (*WHOLE, *CROPS, *(View(corner, mirror=True) for corner in CORNERS))
VIEWS = {"hflip": WHOLE, "crops": (View(), *CROPS), "crops+hflip": ALL}


def parse_views(text: str | int | None) -> tuple[View, ...]:
    """Return the views that a setting of test-time augmentation selects.

    `text` is one of the following, otherwise ValueError is raised:
    - "hflip": the image and its mirror image
    - "crops": the image and its four corner crops
    - "crops+hflip": these five views and their mirror images
    - N from 2 to 10: the first N of these ten, in the order image, mirror image, crops, mirrored
      crops
    - None or 1: no views
    """
    if text is None:
        return ()
    if str(text).isdecimal():
        if not 1 <= int(text) <= len(ALL):
            raise ValueError(
                "tta must be hflip, crops, crops+hflip, or a number from 1 to "
                f"{len(ALL)}, got {text}"
            )
        return ALL[: int(text)] if int(text) > 1 else ()
    return lookup(VIEWS, str(text), "test-time augmentation")


def make_views(
    image: Image.Image,
    views: tuple[View, ...],
    transform: Callable[[Any], Tensor],
    crop_transform: Callable[[Any], Tensor],
) -> Tensor:
    """Return the V `views` of an image as one tensor (V, C, H, W).

    transform: evaluation transform of the full image. crop_transform: transform of a square crop,
    which must not crop further.
    """
    side = max(round(CROP * min(image.width, image.height)), 1)
    tensors: dict[tuple[int, int] | None, Tensor] = {}
    for corner, _ in views:
        if corner is None:
            tensors.setdefault(corner, transform(image))
        elif corner not in tensors:
            left, top = (
                end * (size - side) for end, size in zip(corner, (image.width, image.height))
            )
            # torchvision annotates only tensors, but also takes PIL images
            crop = F.crop(image, top, left, side, side)  # pyrefly: ignore[bad-argument-type]
            tensors[corner] = crop_transform(crop)
    return torch.stack([
        tensors[view.corner].flip(-1) if view.mirror else tensors[view.corner] for view in views
    ])  # fmt: skip
