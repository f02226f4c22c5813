"""Decoders of segmentation_models_pytorch (smp) as heads on the stages of any network.

smp builds a model with an encoder of its own. Here, it builds the model with a description of the
network's stages instead, and the head keeps the decoder and the classifier of that model.

Shapes: B images, K classes, H W size of the images; for stage i: d_i channels, X_i Y_i grid.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vil.tasks.segmentation.heads import resize
from vil.utils.extras import SEGMENTATION, require_extra
from vil.utils.lookup import lookup

STRIDES = (1, 2, 4, 8, 16, 32)  # of the maps that smp's decoders get
NEEDED = (4, 8, 16)  # strides of stages that a network must have
OPTIONS = {"PSPNet": {"upsampling": STRIDES[-1]}}  # it gets only the coarsest map
DIVISORS = {"PAN": 128}  # of sides of images, if not 32: it halves a map of stride 16 three times
ENCODER = "vil"  # name under which the description of the stages is registered, while smp builds


class Stages:
    """What smp's models ask of an encoder when they are built.

    out_channels: number of channels of the map of each of STRIDES. output_stride: stride that the
    decoder needs for maps that are coarser.
    """

    def __init__(self, out_channels: Sequence[int], depth: int, output_stride: int) -> None:
        self.out_channels, self.output_stride = list(out_channels), output_stride

    def set_in_channels(self, in_channels: int, pretrained: bool) -> None:
        """Ignore the number of channels of the images, which is that of the network."""

    def make_dilated(self, output_stride: int) -> None:
        """Ignore the request for dilated convolutions: `SmpHead` enlarges the maps instead."""


class SmpHead(nn.Module):
    """Decoder and classifier of a model of smp, such as Unet, with smp's default settings.

    The decoder gets maps of the strides 1 to 32. Without a stage of stride 2, the map of this
    stride has no channels, as for transformers in smp. A missing coarsest map is the maximum of 2 x
    2 cells of the map before. Where smp would use dilated convolutions in the network, to get maps
    of stride 8 or 16 instead of coarser ones, the coarser maps are enlarged.

    channels, strides: of all stages of the network, finest first. Raises ValueError for an unknown
    name, and for strides that do not fit.
    """

    stride = 1  # of the logits

    def __init__(
        self, name: str, channels: Sequence[int], strides: Sequence[int], num_classes: int
    ) -> None:
        super().__init__()
        require_extra(SEGMENTATION, f"SEGMENTATION.MODEL smp/{name}")
        import segmentation_models_pytorch as smp

        known = {model.__name__: model for model in smp.MODEL_ARCHITECTURES_MAPPING.values()}
        del known["DPT"]  # it needs a plain ViT of timm
        build = lookup(known, name, "decoder of segmentation_models_pytorch")
        width = dict(zip(strides, channels))
        if not set(NEEDED) <= set(strides) <= set(STRIDES):
            raise ValueError(
                f"smp/{name} needs a network with stages of the strides 4, 8 and 16, and at most "
                f"32, but these are {', '.join(map(str, strides))}: use another network, or set "
                "SEGMENTATION.MODEL to fpn, mlp or upernet"
            )
        self.strides, self.divisor = list(strides), DIVISORS.get(name, STRIDES[-1])
        widths = [0, *(width.get(stride, 0) for stride in STRIDES[1:-1])]
        widths.append(width.get(STRIDES[-1], widths[-1]))
        options = OPTIONS.get(name, {}) | dict(encoder_depth=len(STRIDES) - 1, encoder_weights=None)
        smp.encoders.encoders[ENCODER] = dict(encoder=Stages, params=dict(out_channels=widths))
        try:
            model = build(ENCODER, classes=num_classes, **options)
        finally:
            del smp.encoders.encoders[ENCODER]
        self.output_stride = model.encoder.output_stride
        self.decoder, self.segmentation_head = model.decoder, model.segmentation_head

    @property
    def classifier(self) -> nn.Module:
        """The last convolution."""
        return self.segmentation_head[0]

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map the outputs (B, d_i, X_i, Y_i) of all stages to logits (B, K, H, W).

        H and W are multiples of `divisor`.
        """
        features = dict(zip(self.strides, maps))
        height, width = (side * self.strides[0] for side in maps[0].shape[-2:])
        for stride in STRIDES[:2]:
            grid = height // stride, width // stride
            features.setdefault(stride, maps[0].new_empty(maps[0].shape[0], 0, *grid))
        if STRIDES[-1] not in features:
            features[STRIDES[-1]] = F.max_pool2d(features[STRIDES[-2]], 2)
        limit = self.output_stride
        return self.segmentation_head(self.decoder([
            resize(features[stride], (height // limit, width // limit))
            if stride > limit else features[stride]
            for stride in STRIDES
        ]))  # fmt: skip
