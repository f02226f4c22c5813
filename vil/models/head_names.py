"""Find the parameters of the classification head of an MsViT, timm or torchvision model."""

from torch import nn


def find_heads(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the classification head or heads.

    If the model has `get_classifier()`, as timm's models do, the heads are the module or modules
    that it returns. Otherwise, the head is the last linear layer, or the last convolution if there
    is no linear layer.
    """
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()
        return list(heads) if isinstance(heads, tuple | list) else [heads]
    layers = list(model.modules())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return [(linear or [layer for layer in layers if isinstance(layer, nn.Conv2d)])[-1]]


def find_head_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters of the classification head or heads, see `find_heads`."""
    heads = set(find_heads(model))
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if module in heads
        for leaf, _ in module.named_parameters()
    ]
