"""Learning rates of published recipes, and how a learning rate scales with the batch size."""

from typing import NamedTuple


class LrRange(NamedTuple):
    """Peak learning rates that published recipes use for a family of optimizers.

    The bounds are rounded outwards to 1, 2 or 5 times a power of ten. `source` names a recipe near
    each bound.
    """

    low: float
    high: float
    source: str


# By the `family` of an optimizer's entry. An optimizer without a family has no known range.
LR_RANGES = {
    "adam": LrRange(1e-6, 1e-2, "fine-tuning of CLIP at 1e-6 to 1e-5, ConvNeXt at 4e-3"),
    "adan": LrRange(1e-5, 5e-2, "fine-tuning at 5e-5, Adan's ViT at 1.5e-2"),
    "adafactor": LrRange(1e-6, 2e-2, "ViT of big_vision at 1e-3, T5 at 1e-2"),
    "lion": LrRange(1e-7, 2e-3, "a third to a tenth of AdamW's, as Lion's paper advises"),
    "lamb": LrRange(1e-4, 5e-2, "fine-tuning at 1e-4, DeiT III at 4e-3, BERT at 1e-2"),
    "lars": LrRange(1e-2, 50, "SimCLR at 0.3 per 256 images, ImageNet with 32768 images at 29"),
    "muon": LrRange(1e-5, 5e-2, "AdamW's rates, to which timm's Muon scales, up to its 0.02"),
    "novograd": LrRange(1e-4, 1e-1, "NovoGrad's Transformer at 1e-3, its ResNet at 1e-2"),
    "rmsprop": LrRange(1e-5, 5e-1, "MobileNet at 1e-2, EfficientNet with 4096 images at 0.256"),
    "sgd": LrRange(1e-5, 10, "ViT's fine-tuning at 1e-3, ResNet-50 with 8192 images at 3.2"),
    "adagrad": LrRange(1e-4, 1, "word vectors at 5e-2, torch's default 1e-2"),
    "adadelta": LrRange(1e-3, 2, "the paper's 1.0"),
}


def lr_factor(batch_size: int, reference: int, scaling: str) -> float:
    """Return the factor on a learning rate that was chosen for `reference` images per step.

    scaling: "linear" (Goyal et al., arXiv:1706.02677) or "sqrt" (Malladi et al., arXiv:2205.10287).
    A reference of 0 gives 1.
    """
    ratio = batch_size / reference if reference else 1.0
    return ratio**0.5 if scaling == "sqrt" else ratio


def default_scaling(optimizer: str) -> str:
    """Return "sqrt" for an optimizer of the Adam and LAMB families, else "linear".

    This is the rule of timm's train script: a name that contains "ada" or "lamb" means "sqrt".
    """
    return "sqrt" if any(part in optimizer for part in ("ada", "lamb")) else "linear"


def explain_unusual_lr(lr: float, family: str | None) -> str | None:
    """Return why a peak learning rate is unusual for a family of optimizers; None if it is not, or
    if the family has no known range."""
    known = LR_RANGES.get(family)
    if known is None or known.low <= lr <= known.high:
        return None
    side = "above" if lr > known.high else "below"
    return f"{side} {known.low:g} to {known.high:g}, the range of published recipes"
