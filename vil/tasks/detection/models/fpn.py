"""The backbone of a detector: a network, and a feature pyramid on the outputs of its stages.

Shapes: B images, H W padded size of the images, C channels, X Y rows and columns of a map. `sizes`
(B, 2) int64: height and width of each image without padding.
Source: Feature Pyramid Networks, arXiv:1612.03144; P6 and P7 from Focal Loss, arXiv:1708.02002.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from vil.layers.padding import downsample_valid, zero_padding
from vil.models.vision_longformer import MsViT

Levels = dict[int, Tensor]  # {stride: level (1, C, X, Y) of an image without padding}
EPS = 1e-6  # added to the variance of a channel, which is 0 where a map is constant


class Pyramid(FeaturePyramidNetwork):
    """torchvision's feature pyramid, but the padding of images is zeroed before 3 x 3 convolutions.

    Args:
        in_channels: channels of each input map, finest first.
        channels: channels of every level.
        extra: coarser levels to add: ("pool",) for R-CNN, ("p6",) or ("p6", "p7") for RetinaNet, or
            (). "pool" subsamples the coarsest of the other levels by 2. "p6" is a stride-2
            convolution of the coarsest input map. "p7" is a ReLU and such a convolution of "p6".
    """

    def __init__(self, in_channels: Sequence[int], channels: int, extra: Sequence[str]) -> None:
        top = LastLevelMaxPool() if "pool" in extra else None
        if "p6" in extra:
            top = LastLevelP6P7(in_channels[-1], channels)
            if "p7" not in extra:
                del top.p7
        super().__init__(list(in_channels), channels, top)

    def forward(self, maps: Sequence[Tensor], valid: Sequence[Tensor | None]) -> list[Tensor]:
        """Return all levels of the pyramid, finest first.

        maps: output (B, C_i, X_i, Y_i) of each stage i, finest first. valid: for each map, the
        numbers of rows and columns of each image without padding, (B, 2); None if no image is
        padded.
        """
        laterals = [block(x) for block, x in zip(self.inner_blocks, maps)]
        for i in reversed(range(len(laterals) - 1)):
            size = laterals[i].shape[-2:]
            laterals[i] = laterals[i] + F.interpolate(laterals[i + 1], size, mode="nearest")
        levels = [
            block(zero_padding(x, valid_hw))
            for block, x, valid_hw in zip(self.layer_blocks, laterals, valid)
        ]
        if isinstance(self.extra_blocks, LastLevelMaxPool):
            return [*levels, levels[-1][:, :, ::2, ::2]]
        x, valid_hw = maps[-1], valid[-1]
        for conv in self.extra_blocks.children() if self.extra_blocks else ():
            levels.append(conv(zero_padding(x, valid_hw)))
            x = F.relu(levels[-1])
            valid_hw = None if valid_hw is None else downsample_valid(valid_hw, 2)
        return levels


class Backbone(nn.Module):
    """Backbone for torchvision's detectors: a network followed by a feature pyramid.

    Args:
        body: a network with `strides`, `channels` and `forward_intermediates`, such as MsViT.
        stages: the stages, counted from 1, whose outputs enter the pyramid.
        channels: channels of every pyramid level.
        extra: coarser levels to add, see `Pyramid`.
        norm: whether to apply a LayerNorm to each stage's output.

    Raises ValueError unless the highest of `stages` is the network's last stage.
    """

    def __init__(
        self,
        body: nn.Module,
        stages: Sequence[int],
        channels: int,
        extra: Sequence[str],
        norm: bool,
    ) -> None:
        super().__init__()
        count = len(body.channels)
        if max(stages) != count:
            raise ValueError(
                f"the feature pyramid has the stages {', '.join(map(str, stages))}, but must end "
                f"with the network's last stage, {count}: change DETECTION.FPN.STAGES"
            )
        self.body, self.stages = body, [number - 1 for number in stages]
        widths = [body.channels[i] for i in self.stages]
        self.norms = nn.ModuleList(LayerNorm2d(w) if norm else nn.Identity() for w in widths)
        self.fpn = Pyramid(widths, channels, extra)
        self.out_channels = channels
        self.strides = [body.strides[i] for i in self.stages]
        self.strides += [self.strides[-1] * 2 ** (i + 1) for i in range(len(extra))]
        # without "pool", which repeats positions of another level
        self.learned_strides = self.strides[: len(self.strides) - ("pool" in extra)]
        self.divisor = body.strides[-1]

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Map images (B, 3, H, W) to the pyramid levels {"0": finest level, "1": ...}.

        H and W must be multiples of `self.divisor`, the stride of the last stage. sizes (B, 2):
        height and width of each image without padding; None if no image is padded.
        """
        maps = self.body.forward_intermediates(images, intermediates_only=True, valid=sizes)
        valid = [None if sizes is None else downsample_valid(sizes, s) for s in self.body.strides]
        maps = [norm(maps[i]) for norm, i in zip(self.norms, self.stages)]
        levels = self.fpn(maps, [valid[i] for i in self.stages])
        return {str(i): level for i, level in enumerate(levels)}


def pyramid_distance(levels: Levels, wanted: Levels) -> Tensor:
    """Return the distance of an image's pyramid from that of a teacher, a scalar.

    It is 1 - r, averaged over the channels of a level and summed over the strides that both have. r
    is the Pearson correlation of a channel with that of the teacher, over the positions of the map.
    Source: PKD, arXiv:2207.02039. There, positions are those of a batch.
    """
    distances = []
    for stride in (stride for stride in levels if stride in wanted):
        normalized = (
            F.layer_norm(level.float().flatten(2), (level[0, 0].numel(),), eps=EPS)
            for level in (levels[stride], wanted[stride])
        )
        distances.append(F.mse_loss(*normalized) / 2)
    return torch.stack(distances).sum()


def strip_head(model: MsViT) -> MsViT:
    """Replace the final norm and the head of a classifier with nn.Identity. Returns the model."""
    model.norm, model.head = nn.Identity(), nn.Identity()
    return model
