"""Group a model's parameters by weight decay and, for layer-wise learning rates, by layer."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from timm.models import group_parameters
from torch import nn


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    weight_decay_norm: float,
    no_decay: Collection[str] = (),
    *,
    layer_of: Callable[[str], int] | None = None,
    num_layers: int = 0,
    layer_decay: float = 1.0,
) -> list[dict]:
    """Group parameters by weight decay and layer, and return the groups for an optimizer.

    Frozen parameters are skipped. A shared parameter is listed once, under its first name. Groups
    with `weight_decay` come before groups with `weight_decay_norm`. Keys of a group:

    params        list of (name, parameter)
    weight_decay  `weight_decay` or `weight_decay_norm`
    no_decay      whether the argument `no_decay` lists these parameters
    lr_scale      factor by which the caller must multiply the group's learning rate

    Args:
        weight_decay: weight decay of the parameters whose names are not in `no_decay`.
        weight_decay_norm: weight decay of the parameters whose names are in `no_decay`.
        no_decay: names of parameters, for example from a model's `no_weight_decay()`.
        layer_of: function that maps a parameter's name to the index of its layer, from 0 (the first
            patch embedding) to `num_layers` (the head).
        layer_decay: ratio of the learning rates of one layer and the next layer, as in BEiT
            (arXiv:2106.08254). If it is not 1, each layer has separate groups, whose "lr_scale" is
            layer_decay^(num_layers - layer).
    """
    groups: dict[tuple[bool, int], list] = {}
    seen = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        layer = layer_of(name) if layer_of and layer_decay != 1 else num_layers
        assert 0 <= layer <= num_layers, f"{name} is in layer {layer} of 0 .. {num_layers}"
        groups.setdefault((name in no_decay, layer), []).append((name, parameter))
    return [
        {
            "params": params,
            "weight_decay": weight_decay_norm if without else weight_decay,
            "no_decay": without,
            "lr_scale": layer_decay ** (num_layers - layer),
        }
        for (without, layer), params in sorted(groups.items(), key=lambda item: item[0])
    ]


def find_no_decay_params(model: nn.Module) -> set[str]:
    """Return the names of the parameters to exclude from weight decay.

    These are all scalars and vectors, and the names that `model.no_weight_decay()` returns, if the
    model has this method. If the model has a true attribute `decays_biases`, they are only the
    latter.
    """
    own: Any = model
    named = own.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    if getattr(model, "decays_biases", False):
        return set(named)
    return {name for name, p in model.named_parameters() if p.ndim <= 1} | set(named)


def number_layers(model: nn.Module) -> dict[str, int]:
    """Return {parameter name: layer number}, for layer-wise learning rate decay.

    Layer 0 is next to the input. The layers are defined by the model's `group_matcher`, a method of
    timm models. Raises ValueError if the model has no such method.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(
            f"{type(model).__name__} does not support OPTIM.LAYER_DECAY, which needs timm's method "
            "group_matcher to number the layers: set OPTIM.LAYER_DECAY to 1, or use a timm model"
        )
    return cast(dict[str, int], group_parameters(model, matcher(coarse=False), reverse=True))
