"""Learn the feature pyramid of another detector, the teacher, besides boxes and masks.

Source: PKD, arXiv:2207.02039, see `pyramid_distance`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vil.tasks.detection.models.fpn import Backbone, Levels
from vil.tasks.distillation.teacher import Teacher
from vil.utils.errors import ConfigError


class PyramidDistillation:
    """Mixes the losses of a detector with the distance of its pyramid from that of a teacher.

    teacher: finds a detector. share: weight of the distance; the detector's own losses have the
    rest. channels, strides: of the levels of the student's pyramid.
    """

    channels: int
    strides: Sequence[int]

    def __init__(self, teacher: Teacher, *, share: float):
        self.teacher, self.share = teacher, share

    def fit(self, backbone: Backbone) -> None:
        """Set the channels and the strides of the student."""
        self.channels, self.strides = backbone.out_channels, backbone.learned_strides

    def open(self) -> None:
        """Load the teacher. Raises ConfigError if its pyramid cannot be compared with the
        student's."""
        name, backbone = self.teacher.name, self.teacher.network.backbone
        strides = backbone.learned_strides
        if backbone.out_channels != self.channels:
            raise ConfigError(
                f"DISTILL.TEACHER {name} has {backbone.out_channels} channels in its pyramid, but "
                f"the network has {self.channels}: set DETECTION.FPN.CHANNELS to those of the "
                "teacher"
            )
        if not set(self.strides) & set(strides):
            raise ConfigError(
                f"DISTILL.TEACHER {name} has a pyramid with the strides {strides}, but the network "
                f"has {self.strides}: use a teacher with a stride in common"
            )

    @torch.no_grad()
    def levels(self, images: Sequence[Tensor]) -> list[Levels]:
        """Return the teacher's pyramid of each image (3, H, W), see `PerImageDetector.pyramid`."""
        return self.teacher.network.pyramid(images)

    def mix(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch. losses: those of the detector; "teacher" is the distance."""
        own = sum(loss for name, loss in losses.items() if name != "teacher")
        return (1 - self.share) * own + self.share * losses["teacher"]
