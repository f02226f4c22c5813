"""A network that predicts pixels, for masked image modeling.

Shapes: B images, c channels, H W size of the images in pixels; X Y rows and columns of the last
map, s its stride in pixels.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vil.models.features import last_channels, last_stride, pooled_and_map
from vil.tasks.pretraining.model import PretrainingModel


class PixelModel(PretrainingModel):
    """Predicts the pixels of an image with one linear layer, as in SimMIM (section 3).

    The pooled features have a layer too, whose result is added for all cells, so that global tokens
    learn. body: an MsViT or a model of timm without head. channels: c.
    """

    layers = "layers that predict pixels"

    def __init__(self, body: Any, channels: int) -> None:
        stride = last_stride(body)
        size = channels * stride**2
        summary = nn.Linear(body.head_hidden_size, size, bias=False)
        super().__init__(body, summary, nn.Linear(last_channels(body), size))
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images with masked pixels to predicted images, both (B, c, H, W)."""
        pooled, last = pooled_and_map(self.body, images)
        cells = self.dense(last.flatten(2).mT) + self.summary(pooled)[:, None]  # (B, X*Y, c*s*s)
        return F.pixel_shuffle(cells.mT.unflatten(2, last.shape[2:]), self.stride)
