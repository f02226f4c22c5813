"""A student: a network without its head, and projectors to the features of a teacher.

Shapes: B images, c channels, H W size of the images in pixels; X Y rows and columns of the last
grid; D features of the teacher.
"""

from typing import Any

from torch import Tensor, nn

from vil.models.features import last_channels, pooled_and_map
from vil.tasks.pretraining.model import PretrainingModel


class Student(PretrainingModel):
    """Predicts the features of a teacher. The projectors are used only for that.

    body: an MsViT or a model of timm without head. summary_size, dense_size: sizes D of the
    teacher's summary and dense features.
    """

    layers = "projectors to the features of this teacher"

    def __init__(self, body: Any, summary_size: int, dense_size: int) -> None:
        summary = projector(body.head_hidden_size, summary_size)
        super().__init__(body, summary, projector(last_channels(body), dense_size))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map normalized images (B, c, H, W) to the predicted summaries (B, D) and dense features
        (B, X*Y, D) of the teacher."""
        pooled, dense = pooled_and_map(self.body, images)
        return self.summary(pooled), self.dense(dense.flatten(2).mT)


def projector(size: int, target_size: int) -> nn.Module:
    """Build a two-layer MLP with LayerNorm and GELU between the layers, as in AM-RADIO
    (arXiv:2312.06709)."""
    return nn.Sequential(
        nn.Linear(size, target_size),
        nn.LayerNorm(target_size),
        nn.GELU(),
        nn.Linear(target_size, target_size),
    )
