"""Split a model's parameters by weight decay and, if wanted, by depth, with a rate per layer."""

from collections.abc import Callable, Collection, Iterable

from torch import nn


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    weight_decay_norm: float,
    no_decay: Callable[[str], bool] | Collection[str] = (),
    *,
    layer_of: Callable[[str], int] | None = None,
    num_layers: int = 0,
    layer_decay: float = 1.0,
) -> list[dict]:
    """Optimizer groups, those with decay first, each in the order of `named_parameters`.

    `no_decay` says which names get `weight_decay_norm`: the names themselves, as a model's
    `no_weight_decay()` lists them, or a function of the name. Frozen parameters are left out, a
    shared one counts once, under its first name; an empty group is not returned. The groups hold
    (name, parameter) pairs: the names travel inside the optimizer, and checkpoints use them.

    `layer_of` gives the layer 0 .. num_layers of a name: 0 for the first embedding, num_layers for
    the head. There is then a group per layer, whose `lr_scale` is layer_decay^(num_layers - layer)
    (fine-tuning of BEiT, arXiv:2106.08254: layers near the input keep more of what they learnt).
    """
    exempt = no_decay if callable(no_decay) else set(no_decay).__contains__
    groups: dict[tuple[bool, int], list] = {}
    seen = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        layer = layer_of(name) if layer_of and layer_decay != 1 else num_layers
        assert 0 <= layer <= num_layers, f"{name} is in layer {layer} of 0 .. {num_layers}"
        groups.setdefault((bool(exempt(name)), layer), []).append((name, parameter))
    return [
        {
            "params": params,
            "weight_decay": weight_decay_norm if spared else weight_decay,
            "lr_scale": layer_decay ** (num_layers - layer),
        }
        for (spared, layer), params in sorted(groups.items(), key=lambda item: item[0])
    ]
