"""Adapt the first convolution of trained weights to another number of image channels.

Shapes: O output channels, C input channels of the weights, h w size of the kernel.
"""

import torch
from torch import Tensor, nn

from vil.models.vision_longformer import MsViT

MSVIT_STEM = "stages.0.embed.proj.weight"


def find_stems(model: nn.Module) -> tuple[str, ...]:
    """Return the weight names of the convolutions that are applied to the image (stems), such as
    "stages.0.embed.proj.weight"."""
    if isinstance(model, MsViT):
        return (MSVIT_STEM,)
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    return tuple(f"{name}.weight" for name in ((first,) if isinstance(first, str) else first))


def adapt_stem(weight: Tensor, shape: torch.Size) -> Tensor | None:
    """Convert the weight (O, C, h, w) of a convolution to another number of input channels.

    If the new number is 1, the weight is summed over C. A gray image then gives the outputs that C
    copies of it gave before. Otherwise, the weight is repeated along C, and scaled so that the
    outputs keep their magnitude. Generalizes timm's adapt_input_conv to any C.

    shape: the new shape of the weight. Returns None if its O, h or w differs.
    """
    if weight.ndim != 4 or (weight.shape[0], *weight.shape[2:]) != (shape[0], *shape[2:]):
        return None
    before, after = weight.shape[1], shape[1]
    exact = weight.float()
    if after == 1:
        return exact.sum(1, keepdim=True)
    repeated = exact.repeat(1, -(-after // before), 1, 1)[:, :after]
    return repeated * (before / after)
