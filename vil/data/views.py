"""Views of an image for test-time augmentation: mirror images and crops, without randomness."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vil.utils.lookup import lookup

CROP = 7 / 8  # side of a corner crop, as a fraction of the image's shorter side


class View(NamedTuple):
    """One view of an image.

    corner: (x, y), each 0 or 1, of a square crop at a corner of the image; None for the whole
    image, to which the evaluation transform is applied. mirror: whether to mirror the view, left to
    right.
    """

    corner: tuple[int, int] | None = None
    mirror: bool = False


CORNERS = ((0, 0), (1, 0), (0, 1), (1, 1))
WHOLE = (View(), View(mirror=True))
CROPS = tuple(View(corner) for corner in CORNERS)
ALL = (*WHOLE, *CROPS, *(View(corner, mirror=True) for corner in CORNERS))
VIEWS = {"hflip": WHOLE, "crops": (View(), *CROPS), "crops+hflip": ALL}


def parse_views(text: str | int | None) -> tuple[View, ...]:
    """Return the views that a word names.

    text: "hflip" for the image and its mirror image, "crops" for the image and its four corners,
    "crops+hflip" for these five and their mirror images, or a number N for the first N of those
    ten: image, mirror image, corners, mirrored corners. 1 and None return (), for no augmentation.
    Raises ValueError for anything else.
    """
    if text is None:
        return ()
    if str(text).isdecimal():
        if not 1 <= int(text) <= len(ALL):
            raise ValueError(f"tta must be a number from 1 to {len(ALL)}, got {text}")
        return ALL[: int(text)] if int(text) > 1 else ()
    return lookup(VIEWS, str(text), "test-time augmentation")


def make_views(
    image: Image.Image,
    views: tuple[View, ...],
    transform: Callable[[Any], Tensor],
    crop_transform: Callable[[Any], Tensor],
) -> Tensor:
    """Return the views of an image as one tensor (V, C, H, W), in the order of the V `views`.

    transform: evaluation transform, for the whole image. crop_transform: transform of a square
    crop, which keeps all of it. The side of a crop is CROP of the image's shorter side.
    """
    side = max(round(CROP * min(image.size)), 1)
    tensors: dict[tuple[int, int] | None, Tensor] = {}
    for corner, _ in views:
        if corner is None:
            tensors.setdefault(corner, transform(image))
        elif corner not in tensors:
            left, top = (end * (size - side) for end, size in zip(corner, image.size))
            tensors[corner] = crop_transform(image.crop((left, top, left + side, top + side)))
    return torch.stack([
        tensors[view.corner].flip(-1) if view.mirror else tensors[view.corner] for view in views
    ])  # fmt: skip
