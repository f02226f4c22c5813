"""Heads that map the outputs of a network's stages to logits, on the grid of the finest stage.

A head normalizes the channels of each position separately, by LayerNorm. So its output does not
depend on the other images of a batch, nor on statistics of the map: a window of an image gets the
logits of the whole image, except near the window's borders.

Shapes: B images, K classes, C channels of the head; for stage i, from the finest that the head
uses: d_i channels, X_i Y_i rows and columns, which are a multiple of those of the next stage.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FeaturePyramidNetwork

BINS = (1, 2, 3, 6)  # rows and columns of the maps to which UPerNet pools the coarsest stage


class Head(nn.Module):
    """Base class of the heads: a norm for the output of each stage, and the classifier.

    channels, strides: of each stage, finest first. width: number of channels C of the head.
    `factors` are the factors by which the stages' grids are coarser than the finest one. Raises
    ValueError unless each stride is a multiple of the stride before.
    """

    def __init__(
        self, channels: Sequence[int], strides: Sequence[int], width: int, num_classes: int
    ) -> None:
        super().__init__()
        if any(coarse % fine for fine, coarse in pairwise(strides)):
            raise ValueError(
                f"the stages have the strides {', '.join(map(str, strides))}, but each must be a "
                "multiple of the one before: use another network"
            )
        self.stride, self.divisor = strides[0], strides[-1]  # of the logits; of sides of images
        self.factors = [stride // strides[0] for stride in strides]
        self.norms = nn.ModuleList(map(LayerNorm2d, channels))
        self.classifier = nn.Conv2d(width, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def normalize(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Apply the norms to the outputs (B, d_i, X_i, Y_i) of the stages that the head uses.

        maps: the outputs of all stages of the network, of which the head uses the last ones.
        """
        return [norm(x) for norm, x in zip(self.norms, maps[-len(self.norms) :])]


class MlpHead(Head):
    """The head of SegFormer (arXiv:2105.15203, section 3.2), without its batch norm.

    SegFormer applies a linear layer to each stage, enlarges and concatenates the results, and
    applies another linear layer. As enlarging is linear too, the two layers are one: here, the
    enlarged outputs of one linear layer per stage are added. Each position of the finest grid is
    then classified on its own. So the head can be applied to a map in bands of rows.
    """

    def __init__(
        self, channels: Sequence[int], strides: Sequence[int], width: int, num_classes: int
    ) -> None:
        super().__init__(channels, strides, width, num_classes)
        self.layers = nn.ModuleList(nn.Conv2d(d, width, 1) for d in channels)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map the outputs of the stages to logits (B, K, X_1, Y_1)."""
        finest, *coarser = self.project(maps)
        return self.classify(sum(map(enlarge, coarser, self.factors[1:]), finest))

    def project(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map the output of each stage, on its own grid, to C channels: (B, C, X_i, Y_i)."""
        return [layer(x) for layer, x in zip(self.layers, self.normalize(maps))]

    def classify(self, x: Tensor) -> Tensor:
        """Map the sum x (B, C, X_1, Y_1) of the enlarged projections to logits (B, K, X_1, Y_1)."""
        return self.classifier(F.gelu(x))


class FpnHead(Head):
    """Semantic FPN (arXiv:1901.02446, section 3 and figure 3), with LayerNorm for GroupNorm.

    Each level of a feature pyramid is enlarged to the finest grid step by step, from the grid of a
    stage to that of the next finer one, with a 3 x 3 convolution, a norm and a ReLU before each
    step. The results are added and classified.
    """

    def __init__(
        self, channels: Sequence[int], strides: Sequence[int], width: int, num_classes: int
    ) -> None:
        super().__init__(channels, strides, width, num_classes)
        self.pyramid = FeaturePyramidNetwork(list(channels), width)
        self.steps = [1, *(coarse // fine for fine, coarse in pairwise(strides))]
        self.branches = nn.ModuleList(
            nn.ModuleList(conv_block(width, width, 3) for _ in range(max(1, level)))
            for level in range(len(channels))
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map the outputs of the stages to logits (B, K, X_1, Y_1)."""
        levels = list(self.pyramid(dict(enumerate(self.normalize(maps)))).values())
        for level, blocks in enumerate(self.branches):
            for i, block in enumerate(blocks):
                levels[level] = enlarge(block(levels[level]), self.steps[level - i])
        return self.classifier(sum(levels[1:], levels[0]))


class UperHead(Head):
    """UPerNet (arXiv:1807.10221, section 3.1, for a single task), with LayerNorm for batch norm.

    The coarsest stage is pooled to grids of 1, 2, 3 and 6 rows and columns, the pyramid pooling of
    PSPNet (arXiv:1612.01105). Its result is the top of a feature pyramid, whose levels are enlarged
    to the finest grid, concatenated and classified.
    """

    def __init__(
        self, channels: Sequence[int], strides: Sequence[int], width: int, num_classes: int
    ) -> None:
        super().__init__(channels, strides, width, num_classes)
        *finer, top = channels
        self.pools = nn.ModuleList(conv_block(top, width, 1) for _ in BINS)
        self.top = conv_block(top + len(BINS) * width, width, 3)
        self.laterals = nn.ModuleList(conv_block(d, width, 1) for d in finer)
        self.smooth = nn.ModuleList(conv_block(width, width, 3) for _ in finer)
        self.fuse = conv_block(len(channels) * width, width, 3)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map the outputs of the stages to logits (B, K, X_1, Y_1)."""
        *finer, top = self.normalize(maps)
        pooled = [block(F.adaptive_avg_pool2d(top, side)) for block, side in zip(self.pools, BINS)]
        pooled = [resize(x, top.shape[-2:]) for x in pooled]
        levels = [self.top(torch.cat([top, *pooled], dim=1))]
        for lateral, x in reversed(list(zip(self.laterals, finer))):
            levels.insert(0, lateral(x) + resize(levels[0], x.shape[-2:]))
        levels[:-1] = [block(x) for block, x in zip(self.smooth, levels)]
        return self.classifier(self.fuse(torch.cat(list(map(enlarge, levels, self.factors)), 1)))


HEADS = {"fpn": FpnHead, "mlp": MlpHead, "upernet": UperHead}


def conv_block(in_channels: int, channels: int, kernel: int) -> nn.Sequential:
    """Build a convolution with zero padding, followed by a LayerNorm of the channels and a ReLU."""
    conv = nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, LayerNorm2d(channels), nn.ReLU())


def enlarge(x: Tensor, factor: int) -> Tensor:
    """Enlarge x (B, C, X, Y) by an integer factor, bilinear with the borders repeated."""
    return x if factor == 1 else resize(x, (x.shape[-2] * factor, x.shape[-1] * factor))


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize x (B, C, X, Y) to `size` (rows, columns), bilinear without aligned corners."""
    return F.interpolate(x, size, mode="bilinear", align_corners=False)
