"""Anchors at known strides.

torchvision computes strides as image size / map size, which is wrong for a level halved from an odd
number of cells, and for levels cropped to an image without padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList


class Anchors(AnchorGenerator):
    """Anchors at multiples of each level's stride.

    sides: of a level's square anchor in pixels, finest level first. octaves: sizes per level, from
    side to below 2 * side. ratios: height / width.
    """

    def __init__(
        self, sides: Sequence[float], octaves: int, ratios: Sequence[float], strides: Sequence[int]
    ) -> None:
        if len(sides) != len(strides):
            raise ValueError(
                f"sizes of anchors: {len(sides)} for {len(strides)} levels, of strides "
                f"{', '.join(map(str, strides))}"
            )
        scales = [2 ** (i / octaves) for i in range(octaves)]
        super().__init__(
            tuple(tuple(side * scale for scale in scales) for side in sides),
            (tuple(ratios),) * len(sides),
        )
        self.strides = list(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return anchors (A, 4) float32 per image, finest level first, equal for all images."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        grids = [list(level.shape[-2:]) for level in feature_maps]
        strides = [[torch.tensor(stride, device=device)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors(grids, strides))
        return [anchors] * len(image_list.image_sizes)
