"""Anchors at known strides.

torchvision divides an image's side by a map's, which is not the stride where a level was halved
from an odd number of cells, nor where padding was cut off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList


class Anchors(AnchorGenerator):
    """Boxes around the corners of each level's cells, at multiples of its stride.

    sides: of a level's square anchor in pixels, finest level first; octaves: sizes per level, from
    side to (below) twice as large; ratios: height over width.
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
        """(A, 4) float32 for each image, finest level first; the same for all of a batch."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        grids = [list(level.shape[-2:]) for level in feature_maps]
        strides = [[torch.tensor(stride, device=device)] * 2 for stride in self.strides]
        every = torch.cat(self.grid_anchors(grids, strides))
        return [every] * len(image_list.image_sizes)
