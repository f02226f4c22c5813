"""Call linear layers, with compiled code where it is faster than PyTorch."""

from torch import Tensor, nn

from vil.ops.linear import linear
from vil.ops.linear_case import LINEAR, is_native


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Map x (..., I) to layer(x) (..., O), for a linear layer with I input and O output features.

    Calls `vil.ops.linear.linear` if compiled code is selected and the layer is a plain nn.Linear.
    Otherwise calls the layer.
    """
    native = type(layer) is nn.Linear and is_native(LINEAR, x, layer.out_features)
    if native and is_plain(layer):
        return linear(x, layer.weight, layer.bias)
    return layer(x)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a module is an nn.Linear without hooks, with plain tensors as parameters."""
    if type(layer) is not nn.Linear or has_hooks(layer):
        return False
    return all(has_plain_type(x) for x in (layer.weight, layer.bias) if x is not None)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a `forward` that was replaced in this instance.

    Calling such a module may do more than the `forward` of its class, for example record tensors.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def drops(module: nn.Module, training: bool | None = None) -> bool:
    """Return whether a module applies dropout in training (True) or evaluation (False). By default,
    the phase is the module's current mode."""
    if not isinstance(module, nn.Dropout) or not module.p:
        return False
    return module.training if training is None else training


def has_plain_type(x: Tensor | None) -> bool:
    """Return whether x is a plain Tensor or Parameter. False for None and subclasses."""
    return type(x) in (Tensor, nn.Parameter)
