"""Anchors, RoI pooling and heads for torchvision's detectors, for pyramid levels of any strides.

Shapes: C channels of the pyramid, P pooled boxes of all images, A anchors.
Sources: Faster R-CNN, arXiv:1506.01497; Mask R-CNN, arXiv:1703.06870; Focal Loss, arXiv:1708.02002;
version v2 of the heads, arXiv:2111.11429.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import MultiScaleRoIAlign, box_area

logger = logging.getLogger(__name__)

POOLED, MASK_POOLED = 7, 14  # output size of RoI pooling for boxes, for masks
PER_GROUP = 8  # channels per group of RetinaNet's v2 GroupNorm, as published: 256 in 32 groups
BOX_CONVS = 4  # convolutions of the v2 box head
CANONICAL_SIDE, CANONICAL_OCTAVE = 224, 4  # a box with a side of 224 pixels is pooled at stride 2^4


class Anchors(AnchorGenerator):
    """Anchor generator with a given stride for each pyramid level.

    torchvision's strides, image size / map size, are wrong for a level that halves an odd number of
    rows or columns, and for a level from which padding is cropped.

    Args:
        sides: side in pixels of the smallest square anchor of each level, finest level first.
        octaves: number of anchor sizes per level, side * 2^(i / octaves) for i = 0 .. octaves - 1.
        ratios: aspect ratios height / width of the anchors. Their sides are rounded to even pixels,
            as in torchvision. A warning is logged if some anchors are then the same, or empty.
        strides: stride of each level in pixels.

    Raises ValueError unless there is one side per stride.
    """

    def __init__(
        self, sides: Sequence[float], octaves: int, ratios: Sequence[float], strides: Sequence[int]
    ) -> None:
        if len(sides) != len(strides):
            raise ValueError(
                f"there are {len(sides)} anchor sizes for {len(strides)} levels, with strides "
                f"{', '.join(map(str, strides))}: set DETECTION.ANCHORS.SIZES to one size per level"
            )
        scales = [2 ** (i / octaves) for i in range(octaves)]
        super().__init__(
            tuple(tuple(side * scale for scale in scales) for side in sides),
            (tuple(ratios),) * len(sides),
        )
        self.strides = list(strides)
        for side, anchors in zip(sides, self.cell_anchors):
            kept = anchors[(anchors[:, 2:] > anchors[:, :2]).all(1)].unique(dim=0)
            if len(kept) < len(anchors):
                text = "DETECTION.ANCHORS: of the %d anchors of size %g, %d are different, because "
                text += "sides are rounded to even pixels: set a larger size or fewer OCTAVES"
                logger.warning(text, len(anchors), side, len(kept))

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return a list with the anchors of each image, (A, 4) float32, finest level first.

        image_list: the batch. feature_maps: the pyramid levels, finest first.
        """
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        grids = [list(level.shape[-2:]) for level in feature_maps]
        strides = [[torch.tensor(stride, device=device)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors(grids, strides))
        return [anchors] * len(image_list.image_sizes)


def to_float32(head: nn.Module) -> nn.Module:
    """Register a hook that casts the head's outputs to float32, and return the head.

    Losses and boxes are then computed in float32 under autocast.
    """
    head.register_forward_hook(_cast_output)
    return head


def _cast_output(head: nn.Module, args: tuple, output: Any) -> Any:
    return tree_map(Tensor.float, output)


class LevelMapper:
    """Assign boxes to pyramid levels of any strides, as in the FPN paper (arXiv:1612.03144).

    Equation 1 of the paper gives the ideal stride of a box, a power of 2. The strides of the levels
    are rounded down to powers of 2. A box is assigned to the coarsest level whose rounded stride is
    at most the ideal stride. If there is none, the box is assigned to the finest level.
    torchvision's LevelMapper needs strides that double from level to level.
    """

    def __init__(self, strides: Sequence[int]) -> None:
        self.octaves = [stride.bit_length() - 1 for stride in strides]

    def __call__(self, boxlists: list[Tensor]) -> Tensor:
        """Return the level index of each of the P boxes of all images, (P,) int64.

        boxlists: list of the boxes (n, 4) of each image.
        """
        sides = box_area(torch.cat(boxlists)).sqrt()
        octave = torch.floor(CANONICAL_OCTAVE + torch.log2(sides / CANONICAL_SIDE) + 1e-6)
        reached = octave[:, None] >= octave.new_tensor(self.octaves)
        return (reached.sum(dim=1) - 1).clamp(min=0)


class Pooler(MultiScaleRoIAlign):
    """Multi-scale RoIAlign for images that each have their own pyramid levels, without padding.

    strides: strides of the levels, finest first. output_size: height and width of the output.
    sampling: RoIAlign's sampling ratio, the number of sampling points per output pixel along each
    axis.
    """

    def __init__(self, strides: Sequence[int], output_size: int, sampling: int) -> None:
        super().__init__([str(i) for i in range(len(strides))], output_size, sampling)
        # torchvision would infer these two attributes from its first batch
        self.scales = [1 / stride for stride in strides]
        self.map_levels = LevelMapper(strides)

    def forward(
        self, x: list[dict[str, Tensor]], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        """Return the features of all boxes, (P, C, output_size, output_size).

        x: list of the pyramid levels {name: (1, C, X, Y)} of each image. boxes: list of the boxes
        (n, 4) of each image. image_shapes: list of the (H, W) of each image.
        """
        pool = super().forward
        return torch.cat([pool(*each) for each in zip(x, [[b] for b in boxes], image_shapes)])


def box_head(version: str, channels: int, hidden: int) -> nn.Module:
    """Build the box head, which maps the features (P, C, 7, 7) of P boxes to (P, hidden).

    version: "v1" for two linear layers, "v2" for convolutions with BatchNorm and a linear layer.
    channels: channels C of the pyramid. hidden: number of output features.
    """
    if version == "v1":
        return TwoMLPHead(channels * POOLED**2, hidden)
    size, convs = (channels, POOLED, POOLED), [channels] * BOX_CONVS
    return FastRCNNConvFCHead(size, convs, [hidden], norm_layer=nn.BatchNorm2d)


def dense_head(version: str, channels: int, anchors: int, classes: int) -> nn.Module:
    """Build RetinaNet's head, which predicts classes and boxes.

    version: "v1", or "v2" to add GroupNorm and the GIoU loss. channels: channels of the pyramid.
    anchors: number of anchors per pixel of a pyramid level. classes: number of classes, including
    the background. Raises ValueError for "v2" unless `channels` is a multiple of 8.
    """
    if version == "v1":
        return RetinaNetHead(channels, anchors, classes)
    if channels % PER_GROUP:
        raise ValueError(
            f"the v2 heads of retinanet need a multiple of {PER_GROUP} channels, got {channels}: "
            "change DETECTION.FPN.CHANNELS"
        )
    norm_layer = partial(nn.GroupNorm, channels // PER_GROUP)
    head = RetinaNetHead(channels, anchors, classes, norm_layer=norm_layer)
    head.regression_head._loss_type = "giou"
    return head
