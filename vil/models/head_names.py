"""Find the parameters of the classification head of an MsViT, timm or torchvision model."""

from torch import nn


def find_head_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of the classification head, or of all heads.

    The head is what `get_classifier()` returns, if the model has that method, as timm's models do.
    Else it is the last linear layer, or the last convolution if there is no linear layer.
    """
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
