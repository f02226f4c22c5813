"""Training transforms of images, boxes, and masks.

Images are uint8 tensors (3, H, W). `DetectionBatch` describes the targets. In evaluation, the
detector resizes the images.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchvision import tv_tensors
from torchvision.ops import clip_boxes_to_image
from torchvision.transforms import v2

from vil.tasks.detection.data.batch import Target
from vil.tasks.detection.data.coco_json import MIN_SIDE

# Color of the padding in large-scale jitter: ImageNet's mean, which normalization maps to 0.
PADDING = [124, 116, 104]


class _AtLeastTwoPixels:
    """Mixin for transforms that resize images. The resized images have at least 2 x 2 pixels.

    torch cannot resize uint8 images to fewer pixels with antialiasing.
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Sample the size of the resized image, and return {"size": (height, width)}."""
        return {"size": tuple(max(side, 2) for side in super().make_params(flat_inputs)["size"])}


class ShortestSize(_AtLeastTwoPixels, v2.RandomShortestSize):
    """Transform that resizes the shorter side of an image to a length sampled from `min_size`.

    If the longer side would exceed `max_size`, the longer side is resized to `max_size` instead.
    """


class ScaleJitter(_AtLeastTwoPixels, v2.ScaleJitter):
    """Transform that scales an image to fit into `target_size`, and then by a random factor."""


def train_transform(
    *, sizes: Sequence[int], max_size: int, flip: float = 0.5, jitter: Sequence[float] = ()
) -> Callable[[Tensor, Target], tuple[Tensor, Target]]:
    """Build a transform that randomly resizes and horizontally flips an image and its target.

    sizes: lengths of the shorter side in pixels, one of which is sampled for each image. max_size:
    maximum of the longer side. flip: probability of a flip.
    jitter: (low, high) for large-scale jitter (Ghiasi et al., arXiv:2012.07177) instead of `sizes`.
    The image is fitted into max_size x max_size, scaled by a random factor in this range, and
    cropped or padded to max_size x max_size.
    """
    if jitter:
        square, fill = (max_size, max_size), {tv_tensors.Image: PADDING, "others": 0}
        crop = v2.RandomCrop(square, pad_if_needed=True, fill=fill)
        resize = [ScaleJitter(square, tuple(jitter)), crop]
    else:
        resize = [ShortestSize(list(sizes), max_size)]
    compose = v2.Compose([*resize, v2.RandomHorizontalFlip(flip)])

    def transform(image: Tensor, target: Target) -> tuple[Tensor, Target]:
        size = tuple(image.shape[-2:])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        masks = {"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {}
        image, target = compose(tv_tensors.Image(image), {**target, "boxes": boxes, **masks})
        plain = tree_map_only(Tensor, lambda value: value.as_subclass(Tensor), target)
        return image.as_subclass(Tensor), clip_boxes(plain, image.shape[-2:], cropped=bool(jitter))

    return transform


def clip_boxes(target: Target, size: Sequence[int], *, cropped: bool = False) -> Target:
    """Clip boxes to an image of `size` (H, W), and drop objects with a box side below MIN_SIDE.

    cropped: whether the image was cropped. If so, objects with an empty mask are also dropped,
    because they may be outside of the crop.
    """
    boxes = clip_boxes_to_image(target["boxes"], tuple(size))
    keep = (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE).all(dim=1)
    if cropped and "masks" in target:
        keep &= target["masks"].flatten(1).any(dim=1).bool()  # any() of uint8 returns uint8
    return tree_map_only(Tensor, lambda value: value[keep], {**target, "boxes": boxes})
