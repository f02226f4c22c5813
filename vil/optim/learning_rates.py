"""Learning rates of published recipes, and scaling of learning rates with the batch size."""

from typing import NamedTuple


class LrRange(NamedTuple):
    """Range of the peak learning rates in published recipes for a family of optimizers.

    low, high: limits of the range, rounded outward to 1, 2 or 5 times a power of ten. source: text
    that names recipes and their learning rates.
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
    """Return the factor by which to multiply a learning rate for batches of `batch_size` images.

    reference: batch size for which the learning rate was chosen; 0 for a factor of 1. scaling:
    "linear", batch_size / reference (Goyal et al., arXiv:1706.02677), or "sqrt", the square root of
    that (Malladi et al., arXiv:2205.10287).
    """
    ratio = batch_size / reference if reference else 1.0
    return ratio**0.5 if scaling == "sqrt" else ratio


def default_scaling(optimizer: str) -> str:
    """Return the default scaling rule of an optimizer's learning rate, see `lr_factor`.

    optimizer: name of the optimizer. As in timm's train script, the rule is "sqrt" if the name
    contains "ada" or "lamb", and "linear" otherwise.
    """
    return "sqrt" if any(part in optimizer for part in ("ada", "lamb")) else "linear"


def explain_unusual_lr(lr: float, family: str | None) -> str | None:
    """Return a description of how a peak learning rate differs from published recipes.

    family: the optimizer's family, a key of LR_RANGES. Returns None if the learning rate is in the
    range of the family, or if there is no range.
    """
    known = LR_RANGES.get(family)
    if known is None or known.low <= lr <= known.high:
        return None
    side = "above" if lr > known.high else "below"
    return f"{side} the range of published recipes, {known.low:g} to {known.high:g}"
