"""Find the classification head of an MsViT, timm or torchvision model, and its parameters."""

from typing import Protocol, cast

from torch import Tensor, nn

from vil.layers.packed_linear import PackedLinear


class TimmModel(Protocol):
    """The methods of timm's models that this package calls."""

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...] | list[nn.Module]: ...

    def forward_features(self, x: Tensor) -> Tensor: ...

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor: ...


def find_heads(model: nn.Module) -> list[nn.Module]:
    """Return the list of a model's classification heads, usually one.

    If the model has the method `get_classifier`, as timm's models do, the method returns the heads.
    Otherwise, the head is the last linear layer or, without linear layers, the last convolution.
    """
    if hasattr(model, "get_classifier"):
        heads = cast(TimmModel, model).get_classifier()
        return list(heads) if isinstance(heads, tuple | list) else [heads]
    layers = list(model.modules())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear | PackedLinear)]
    return [(linear or [layer for layer in layers if isinstance(layer, nn.Conv2d)])[-1]]


def find_head_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters of the modules that `find_heads` returns."""
    heads = set(find_heads(model))
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if module in heads
        for leaf, _ in module.named_parameters()
    ]
