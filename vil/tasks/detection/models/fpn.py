"""The backbone of a detector: the stages of a network, and a feature pyramid that padding never
enters.

Letters: B images, H W their padded size, C channels. `sizes` (B, 2) int64: height and width of each
image's real pixels.
Source: Feature Pyramid Networks, arXiv:1612.03144; P6 and P7 from Focal Loss, arXiv:1708.02002.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from vil.layers.padding import downsample_valid, zero_padding
from vil.models.vision_longformer import MsViT


class Body(Protocol):
    """What the pyramid stands on: `strides` and `channels` of each stage, and its maps."""

    strides: Sequence[int]
    channels: Sequence[int]

    def forward_intermediates(
        self, x: Tensor, *, intermediates_only: bool = True, valid: Tensor | None = None
    ) -> list[Tensor]: ...


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map (B, C, X, Y)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pyramid(FeaturePyramidNetwork):
    """torchvision's pyramid; every 3 x 3 convolution sees 0 where an image is padded.

    extra: names of the levels above. "pool" subsamples the coarsest level once more (for R-CNN);
    "p6" and "p7" are convolutions, of the coarsest map that comes in and of p6 (for RetinaNet).
    """

    def __init__(self, in_channels: Sequence[int], channels: int, extra: Sequence[str]) -> None:
        top = LastLevelMaxPool() if "pool" in extra else None
        if "p6" in extra:
            top = LastLevelP6P7(in_channels[-1], channels)
            if "p7" not in extra:
                del top.p7
        super().__init__(list(in_channels), channels, top)

    def forward(self, maps: Sequence[Tensor], valid: Sequence[Tensor | None]) -> list[Tensor]:
        """maps (B, C_i, X_i, Y_i), finest first, and the real cells of each -> all levels."""
        laterals = [block(x) for block, x in zip(self.inner_blocks, maps)]
        for i in reversed(range(len(laterals) - 1)):
            size = laterals[i].shape[-2:]
            laterals[i] = laterals[i] + F.interpolate(laterals[i + 1], size, mode="nearest")
        levels = [
            block(zero_padding(x, real))
            for block, x, real in zip(self.layer_blocks, laterals, valid)
        ]
        if isinstance(self.extra_blocks, LastLevelMaxPool):
            return [*levels, levels[-1][:, :, ::2, ::2]]
        x, real = maps[-1], valid[-1]
        for convolution in self.extra_blocks.children() if self.extra_blocks else ():
            levels.append(convolution(zero_padding(x, real)))
            x, real = F.relu(levels[-1]), None if real is None else downsample_valid(real, 2)
        return levels


class Backbone(nn.Module):
    """Images -> levels of one width, as torchvision's detectors want them.

    stages: numbers of those whose maps enter the pyramid, from 1. extra: see `Pyramid`. norm: a
    LayerNorm on each map.
    Raises ValueError for stages that the body does not have, or that nothing would come of.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        stages: Sequence[int],
        channels: int,
        extra: Sequence[str],
        norm: bool,
    ) -> None:
        super().__init__()
        count = len(body.channels)
        if max(stages) != count:
            raise ValueError(
                f"a pyramid on stages {', '.join(map(str, stages))} of a network with {count}: "
                "it must take the last one, and those that are there"
            )
        self.body, self.stages = body, [number - 1 for number in stages]
        widths = [body.channels[i] for i in self.stages]
        self.norms = nn.ModuleList(MapNorm(w) if norm else nn.Identity() for w in widths)
        self.fpn = Pyramid(widths, channels, extra)
        self.out_channels = channels
        self.strides = [body.strides[i] for i in self.stages]
        self.strides += [self.strides[-1] * 2 ** (i + 1) for i in range(len(extra))]
        self.divisor = body.strides[-1]

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """images (B, 3, H, W), whose sides `divisor` divides -> {"0": finest level, ...}."""
        maps = self.body.forward_intermediates(images, intermediates_only=True, valid=sizes)
        valid = [None if sizes is None else downsample_valid(sizes, s) for s in self.body.strides]
        maps = [norm(maps[i]) for norm, i in zip(self.norms, self.stages)]
        levels = self.fpn(maps, [valid[i] for i in self.stages])
        return {str(i): level for i, level in enumerate(levels)}


def body_of(model: MsViT) -> MsViT:
    """The network without what only a classifier has: the last norm and the head."""
    model.norm, model.head = nn.Identity(), nn.Identity()
    return model
