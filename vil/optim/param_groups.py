"""Group a model's parameters by weight decay and, for layer-wise learning rates, by layer."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from timm.models import group_parameters
from torch import nn


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    weight_decay_norm: float,
    no_decay: Collection[str] = (),
    *,
    layers: Mapping[str, int] | None = None,
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
        layers: {parameter name: number of its layer}, from 0, the first patch embedding, to the
            largest, the head.
        layer_decay: ratio of the learning rates of one layer and the next layer, as in BEiT
            (arXiv:2106.08254). If it is not 1, each layer has separate groups, whose "lr_scale" is
            layer_decay^(largest - layer).
    """
    last = max(layers.values()) if layers else 0
    groups: dict[tuple[bool, int], list] = {}
    seen = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        layer = layers[name] if layers and layer_decay != 1 else last
        groups.setdefault((name in no_decay, layer), []).append((name, parameter))
    return [
        {
            "params": params,
            "weight_decay": weight_decay_norm if without else weight_decay,
            "no_decay": without,
            "lr_scale": layer_decay ** (last - layer),
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

    Layer 0 is next to the input. The layers are defined by the model's method `layer_of` or, in a
    model of timm, by its method `group_matcher`. Raises ValueError if the model has neither.
    """
    own: Any = model
    if hasattr(model, "layer_of"):
        return {name: own.layer_of(name) for name, _ in model.named_parameters()}
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(
            f"{type(model).__name__} does not support OPTIM.LAYER_DECAY, which needs timm's method "
            "group_matcher to number the layers: set OPTIM.LAYER_DECAY to 1, or use a timm model"
        )
    return cast(dict[str, int], group_parameters(model, matcher(coarse=False), reverse=True))
