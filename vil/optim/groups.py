"""Split a model's parameters into those with weight decay and those without."""

from collections.abc import Callable, Collection, Iterable

from torch import nn


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    weight_decay_norm: float,
    no_decay: Callable[[str], bool] | Collection[str] = (),
) -> list[dict]:
    """At most two optimizer groups, decay first, each in the order of `named_parameters`.

    `no_decay` says which names get `weight_decay_norm`: the names themselves, as a model's
    `no_weight_decay()` lists them, or a function of the name. Frozen parameters are left out, a
    shared one counts once, under its first name; an empty group is not returned. The groups hold
    (name, parameter) pairs: the names travel inside the optimizer, and checkpoints use them.
    """
    exempt = no_decay if callable(no_decay) else set(no_decay).__contains__
    decayed, spared, seen = [], [], set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        (spared if exempt(name) else decayed).append((name, parameter))
    groups = [(decayed, weight_decay), (spared, weight_decay_norm)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
