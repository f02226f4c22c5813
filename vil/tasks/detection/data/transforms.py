"""Training transforms of images with boxes and masks; in evaluation the detector resizes.

Images are uint8 tensors (3, H, W), see `DetectionBatch` for targets.
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

# Around images smaller than the crop of large-scale jitter: ImageNet's mean, 0 once normalized.
PADDING = [124, 116, 104]


class _AtLeastTwoPixels:
    """Keep sides at 2 pixels or more: torch cannot resize uint8 with antialiasing to less."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Return the size (height, width) to resize to."""
        return {"size": tuple(max(side, 2) for side in super().make_params(flat_inputs)["size"])}


class ShortestSize(_AtLeastTwoPixels, v2.RandomShortestSize):
    """Resize the shorter side to one of `min_size`, the longer one to at most `max_size`."""


class ScaleJitter(_AtLeastTwoPixels, v2.ScaleJitter):
    """Resize by a random factor of the size that fits `target_size`."""


def train_transform(
    *, sizes: Sequence[int], max_size: int, flip: float = 0.5, jitter: Sequence[float] = ()
) -> Callable[[Tensor, Target], tuple[Tensor, Target]]:
    """Build the resizing and horizontal flipping of images and targets.

    sizes: of the shorter side, sampled. max_size: of the longer side. flip: probability. jitter:
    (low, high) replaces `sizes` by large-scale jitter (Ghiasi et al., arXiv:2012.07177): a factor
    between them of the size that fits max_size x max_size, cropped or padded to that.
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
    """Clip boxes to an image of size (H, W); drop objects with a side below MIN_SIDE.

    cropped: also drop objects without a pixel of their mask, whose box may remain after a crop.
    """
    boxes = clip_boxes_to_image(target["boxes"], tuple(size))
    keep = (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE).all(dim=1)
    if cropped and "masks" in target:
        keep &= target["masks"].flatten(1).any(dim=1).bool()  # any() of uint8 returns uint8
    return tree_map_only(Tensor, lambda value: value[keep], {**target, "boxes": boxes})
