"""Which parameters belong to a model's classification head, for any model."""

from torch import nn


def find_head_names(model: nn.Module) -> list[str]:
    """The parameters of the head, or heads: timm's classifier; in torchvision's models the last
    linear layer, or the last convolution where there is none."""
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()
        heads = set(heads if isinstance(heads, tuple | list) else [heads])
    else:
        layers = list(model.modules())
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        heads = {(linear or [layer for layer in layers if isinstance(layer, nn.Conv2d)])[-1]}
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if module in heads
        for leaf, _ in module.named_parameters()
    ]
