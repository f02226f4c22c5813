"""Call linear layers, by compiled code where tuning found it faster."""

from torch import Tensor, nn

from vil.ops.linear import linear
from vil.ops.linear_case import LINEAR, is_native


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x) for a linear layer and x (..., I): a tensor (..., O).

    Calls `vil.ops.linear.linear` if tuning found compiled code faster and the layer is a plain
    nn.Linear, otherwise the module.
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
    """Return whether calling a module may do more than its class does.

    This is the case if it has hooks, or if `forward` was replaced in this instance, as other
    packages do to record or to move tensors.
    """
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward)


def has_plain_type(x: Tensor | None) -> bool:
    """Return whether x is a plain tensor or parameter, and not None or of a tensor subclass."""
    return type(x) in (Tensor, nn.Parameter)
