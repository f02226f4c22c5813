"""The heads of torchvision's detectors, with predictions in float32 whatever autocast computes in:
boxes are decoded from them, and losses made of them.

Letters: C channels of the pyramid, A anchors of a cell, K categories and the background.
Sources: Faster R-CNN, arXiv:1506.01497; Mask R-CNN, arXiv:1703.06870; Focal Loss, arXiv:1708.02002;
the second generation of heads, arXiv:2111.11429.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import (
    FastRCNNConvFCHead,
    FastRCNNPredictor,
    TwoMLPHead,
)
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, box_area

POOLED, MASK_POOLED = 7, 14  # side of what is pooled for a box, and for its mask
# Channels that a norm of retinanet's second heads takes together: 32 groups of the published 256.
PER_GROUP = 8
BOX_CONVS = 4  # convolutions of the second box head
USUAL_SIDE, USUAL_OCTAVE = 224, 4  # a box of that side is pooled at a stride of 2^4


class ObjectnessHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, deltas = super().forward(x)
        return [level.float() for level in scores], [level.float() for level in deltas]


class BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores.float(), deltas.float()


class MaskPredictor(MaskRCNNPredictor):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class DenseHead(RetinaNetHead):
    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:
        return {name: found.float() for name, found in super().forward(x).items()}


class Levels:
    """Which level a box is pooled from: the coarsest whose stride is at most that of the pyramid
    paper's formula (arXiv:1612.03144, equation 1). torchvision's own takes strides that double from
    level to level for granted, and pools nothing for boxes of levels that are left out."""

    def __init__(self, strides: Sequence[int]) -> None:
        self.octaves = [stride.bit_length() - 1 for stride in strides]

    def __call__(self, boxlists: list[Tensor]) -> Tensor:
        """Boxes (n, 4) of each image -> (sum of n,) int64."""
        sides = box_area(torch.cat(boxlists)).sqrt()
        wanted = torch.floor(USUAL_OCTAVE + torch.log2(sides / USUAL_SIDE) + 1e-6)
        reached = wanted[:, None] >= wanted.new_tensor(self.octaves)
        return (reached.sum(dim=1) - 1).clamp(min=0)


class Pooler(MultiScaleRoIAlign):
    """Pools from each image's own maps, in which there is no padding to sample from.

    strides: pixels between the cells of each level. output_size: cells on a side of what is pooled.
    sampling: points on a side of such a cell, whose mean it is.
    """

    def __init__(self, strides: Sequence[int], output_size: int, sampling: int) -> None:
        names = [str(i) for i in range(len(strides))]
        super().__init__(names, output_size, sampling)
        # else torchvision would guess both from the first batch it sees
        self.scales = [1 / stride for stride in strides]
        self.map_levels = Levels(strides)

    def forward(
        self, x: list[dict[str, Tensor]], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        """The levels of each image, its boxes (P, 4) -> (sum of P, C, side, side)."""
        pooled = super().forward
        return torch.cat([pooled(*each) for each in zip(x, [[b] for b in boxes], image_shapes)])


def box_head(version: str, channels: int, hidden: int) -> nn.Module:
    """(P, C, 7, 7) -> (P, hidden)."""
    if version == "v1":
        return TwoMLPHead(channels * POOLED**2, hidden)
    convs = [channels] * BOX_CONVS
    return FastRCNNConvFCHead(
        (channels, POOLED, POOLED), convs, [hidden], norm_layer=nn.BatchNorm2d
    )


def mask_head(version: str, channels: int, hidden: int, layers: int) -> nn.Module:
    """(P, C, 14, 14) -> (P, hidden, 14, 14)."""
    norm = nn.BatchNorm2d if version == "v2" else None
    return MaskRCNNHeads(channels, [hidden] * layers, 1, norm_layer=norm)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // PER_GROUP, channels)


def dense_head(version: str, channels: int, anchors: int, classes: int) -> nn.Module:
    """RetinaNet's two towers; those of v2 are normalised, and learn boxes by GIoU."""
    if version == "v2" and channels % PER_GROUP:
        raise ValueError(
            f"retinanet's heads v2 need a multiple of {PER_GROUP} channels, given {channels}"
        )
    if version == "v1":
        return DenseHead(channels, anchors, classes)
    head = DenseHead(channels, anchors, classes, norm_layer=group_norm)
    head.regression_head._loss_type = "giou"
    return head
